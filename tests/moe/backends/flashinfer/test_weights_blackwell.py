"""Weights for Blackwell, bit by bit, against the helpers of FlashInfer that run on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.formats.inverses import deinterleave_up_gate
from turnout.formats import codec, layouts
from turnout.moe.backends.flashinfer import weights_blackwell
from turnout.moe.backends.flashinfer.weights_blackwell import Nvfp4Matrix

CPU = torch.device("cpu")
TILE = 128  # FlashInfer's epilogue_tile_m for all of its kernels


def numbered(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def halves_first_up(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-2)
    return torch.cat([up, gate], dim=-2)


@pytest.mark.parametrize("rows", [128, 256, 384])
def test_up_and_gate_blocks(rows):
    from flashinfer.fused_moe.prepare import _interleave_linear_and_gate

    x = numbered(3, rows, 40)
    assert torch.equal(layouts.interleave_up_gate(x), _interleave_linear_and_gate(halves_first_up(x), 64, 1))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [128, 256])
def test_shuffled_rows_of_gemm1(rows, gated):
    from flashinfer.fused_moe.core import _maybe_get_cached_w3_w1_permute_indices as indices

    x = numbered(2, rows, 16)
    order = weights_blackwell.shuffled_up_gate if gated else layouts.shuffle_rows
    given = halves_first_up(x) if gated else x
    for per_scale in (None, 16):  # of codes and of scales
        index = indices({}, given[0], TILE, per_scale, is_gated_act_gemm=gated)
        assert torch.equal(order(x), given[:, index])


def test_shuffled_rows_of_gemm2():
    from flashinfer.fused_moe.core import get_w2_permute_indices_with_cache as indices
    from flashinfer.quantization import shuffle_matrix_a

    x = numbered(2, 256, 16)
    assert torch.equal(layouts.shuffle_rows(x), x[:, indices({}, x[0], TILE)])
    assert torch.equal(layouts.shuffle_rows(x)[1], shuffle_matrix_a(x[1], TILE))
    with pytest.raises(ValueError, match="33 rows are not blocks of 32"):
        layouts.shuffle_rows(numbered(33, 2))


@pytest.mark.parametrize(("rows", "groups"), [(128, 4), (256, 24), (130, 5)])
def test_tiles_of_scales(rows, groups):
    from flashinfer.cute_dsl.utils import (
        convert_sf_from_mma_layout,
        convert_sf_to_mma_layout,
        get_mma_sf_shape,
    )

    swizzled = layouts.swizzle(numbered(3, rows, groups))
    mine = layouts.mma_view(swizzled)
    theirs = convert_sf_to_mma_layout(swizzled.flatten(), rows, 16 * groups, num_groups=3)
    assert mine.shape == theirs.shape == get_mma_sf_shape(rows, 16 * groups, num_groups=3)
    assert mine.stride() == theirs.stride()
    assert torch.equal(mine, theirs)
    flat = convert_sf_from_mma_layout(mine, rows, 16 * groups, num_groups=3)
    assert torch.equal(flat.flatten(), swizzled.flatten())


def test_scales_are_swizzled_as_the_library_does_it():
    from flashinfer.fused_moe.prepare import _swizzle_cutile_fp4_scales

    for rows, groups in ((128, 4), (256, 24), (130, 5)):
        scales = numbered(3, rows, groups)
        theirs = _swizzle_cutile_fp4_scales(scales, scale_block_size=16)
        assert torch.equal(layouts.swizzle(scales).flatten(-2), theirs)


def test_a_matrix_holds_codes_and_scales_in_one_order():
    weights = codec.encode(torch.randn(2, 256, 128), "nvfp4")
    matrix = Nvfp4Matrix(weights, layouts.interleave_up_gate, CPU)
    assert (matrix.rows, matrix.inner) == (256, 128)
    assert torch.equal(deinterleave_up_gate(matrix.codes), weights.data)
    plain = layouts.unswizzle(matrix.swizzled, 256, 8)
    assert torch.equal(deinterleave_up_gate(plain), weights.scale.view(torch.uint8))
    assert matrix.flat_scales.shape == (2, 256, 8)
    with pytest.raises(ValueError, match="not bf16"):
        Nvfp4Matrix(codec.encode(torch.randn(2, 256, 128), "bf16"), layouts.shuffle_rows, CPU)
