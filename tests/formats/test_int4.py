"""INT4 against compressed-tensors' own scales, quantisation, packing and decompression."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from tests.checkpoint.packing import int4_scheme
from turnout.formats import int4

SCHEME = int4_scheme(group=32, symmetric=True)


def decompress(packed: Tensor, scale: Tensor) -> Tensor:
    state = {
        "weight_packed": packed.view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor([packed.shape[0], 2 * packed.shape[1]]),
    }
    return PackedQuantizationCompressor.decompress(state, SCHEME)["weight"]


def test_every_code_under_scales_of_every_size_decodes_as_the_library_decompresses():
    packed = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scale = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)).abs()
    for exponent in (-120, -30, 0, 30, 120):
        scaled = (scale * 2.0**exponent).bfloat16()
        theirs = decompress(packed, scaled)
        assert theirs.dtype == torch.bfloat16
        assert torch.equal(int4.decode(packed, scaled), theirs.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_encode_as_the_library_calibrates_and_packs_them(dtype):
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1)).to(dtype).float()
    packed, scale = int4.encode(weight.to(dtype))
    groups = weight.unflatten(-1, (-1, 32))
    theirs, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights)
    assert torch.equal(scale, theirs.bfloat16())
    state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
    compressed = PackedQuantizationCompressor.compress(state, SCHEME)
    assert torch.equal(packed.view(torch.int32), compressed["weight_packed"])


def test_the_largest_of_a_group_saturates_upwards_alone():
    x = torch.zeros(2, 32)
    x[0, 3], x[1, 3] = 7.5, -7.5
    packed, scale = int4.encode(x)
    assert scale.tolist() == [[1.0], [1.0]]
    assert int4.decode(packed, scale)[:, 3].tolist() == [7.0, -8.0]


def test_groups_of_zeros_stay_zero_next_to_others():
    x = torch.zeros(1, 64)
    x[0, 40] = 15.0
    packed, scale = int4.encode(x)
    assert scale.tolist() == [[1.0, 2.0]]
    assert int4.decode(packed, scale)[0, :32].eq(0).all()


@pytest.mark.parametrize("columns", [31, 33, 16, 1])
def test_columns_that_leave_a_group_open_are_refused(columns):
    with pytest.raises(ValueError, match=rf"divisible by 32: shape \(2, {columns}\)"):
        int4.encode(torch.zeros(2, columns))
