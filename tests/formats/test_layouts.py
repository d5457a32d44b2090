"""Kernel layouts against the published formulas, one element at a time.

Formula of a tile of 128 rows and 4 groups: PTX ISA, tcgen05.mma "scale factor layout", and cuBLAS,
"1D block scaling factors layout".
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.inverses import deinterleave_up_gate
from turnout.formats import layouts

SHAPES = [(1, 128, 4), (2, 256, 12), (3, 130, 5), (1, 1, 1), (2, 300, 7)]


def numbered(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(1, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_scales_lie_where_the_formula_says(shape):
    experts, rows, groups = shape
    scale = numbered(*shape)
    flat = layouts.swizzle(scale).flatten().tolist()
    group_tiles, row_tiles = -(-groups // 4), -(-rows // 128)
    expected = [0] * (experts * row_tiles * group_tiles * 512)
    for e in range(experts):
        for r in range(rows):
            for g in range(groups):
                tile = (e * row_tiles + r // 128) * group_tiles + g // 4
                place = 512 * tile + (r % 32) * 16 + (r % 128 // 32) * 4 + g % 4
                expected[place] = scale[e, r, g].item()
    assert flat == expected  # the padding included: zeros


@pytest.mark.parametrize("shape", SHAPES)
def test_the_mma_view_is_indexed_as_kernels_do(shape):
    experts, rows, groups = shape
    scale = numbered(*shape)
    swizzled = layouts.swizzle(scale)
    view = layouts.mma_view(swizzled)
    assert view.shape == (32, 4, -(-rows // 128), 4, -(-groups // 4), experts)
    assert view.data_ptr() == swizzled.data_ptr()
    for r in range(0, rows, 3):
        for g in range(groups):
            at = (r % 32, (r % 128) // 32, r // 128, g % 4, g // 4)
            assert torch.equal(view[at], scale[:, r, g])
    assert torch.equal(layouts.from_mma_view(view), swizzled)
    assert torch.equal(layouts.from_mma_view(view.contiguous()), swizzled)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 300),
    st.integers(1, 20),
    st.sampled_from([torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu]),
)
def test_swizzling_is_undone(lead, rows, groups, dtype):
    scale = numbered(*lead, rows, groups).view(dtype)
    swizzled = layouts.swizzle(scale)
    assert swizzled.dtype == dtype
    assert swizzled.is_contiguous()
    back = layouts.unswizzle(swizzled, rows, groups)
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


def test_up_and_gate_alternate_in_blocks_of_64_rows_up_first():
    gate, up = torch.arange(128), torch.arange(1000, 1128)
    w13 = torch.cat([gate, up])[None, :, None].expand(2, 256, 3)
    rows = layouts.interleave_up_gate(w13)[1, :, 2]
    expected = torch.cat([up[:64], gate[:64], up[64:], gate[64:]])
    assert torch.equal(rows, expected)


def test_weights_and_block_scales_are_interleaved_alike():
    w13 = numbered(2, 256, 32)
    scale = w13[..., :4]  # belongs to the same rows
    interleaved = layouts.interleave_up_gate(w13)
    assert torch.equal(layouts.interleave_up_gate(scale), interleaved[..., :4])


@given(st.integers(1, 4), st.sampled_from([8, 32, 64]), st.integers(1, 3))
def test_interleaving_blocks_is_undone(blocks, size, experts):
    w13 = numbered(experts, 2 * blocks * size, 2)
    assert torch.equal(deinterleave_up_gate(layouts.interleave_up_gate(w13, size), size), w13)


def test_gpt_oss_rows_are_gate_up_gate_up():
    w13 = torch.tensor([[10], [11], [12], [20], [21], [22]])  # gate 1x, up 2x
    assert layouts.interleave_gate_up_rows(w13).flatten().tolist() == [10, 20, 11, 21, 12, 22]


@given(st.integers(1, 9), st.integers(1, 3))
def test_gpt_oss_rows_are_restored_as_transformers_splits_them(intermediate, experts):
    rows = numbered(experts, 2 * intermediate, 4)
    halves = layouts.deinterleave_gate_up_rows(rows)
    assert torch.equal(halves, torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1))
    assert torch.equal(layouts.interleave_gate_up_rows(halves), rows)
    bias = rows[..., 0]
    halves = layouts.deinterleave_gate_up_rows(bias, dim=-1)
    assert torch.equal(halves, torch.cat([bias[:, ::2], bias[:, 1::2]], dim=1))
    assert torch.equal(layouts.interleave_gate_up_rows(halves, dim=-1), bias)


def test_shapes_that_have_no_such_layout_are_refused():
    with pytest.raises(ValueError, match="divisible by 64, not 96"):
        layouts.interleave_up_gate(torch.zeros(192, 4))
    with pytest.raises(ValueError, match=r"in pairs; \(3, 4\) has 3"):
        layouts.interleave_gate_up_rows(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"in pairs; \(3, 4\) has 3"):
        layouts.deinterleave_gate_up_rows(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"one-byte tensors .* not torch.float32 \(128, 4\)"):
        layouts.swizzle(torch.zeros(128, 4))
    with pytest.raises(ValueError, match=r"one-byte tensors"):
        layouts.swizzle(torch.zeros(4, dtype=torch.uint8))
    swizzled = layouts.swizzle(numbered(2, 128, 8))
    with pytest.raises(ValueError, match="swizzled scales of 129 rows and 8 groups have shape"):
        layouts.unswizzle(swizzled, 129, 8)
    with pytest.raises(ValueError, match=r"\(E, M, K, 32, 4, 4\), not \(128, 8\)"):
        layouts.mma_view(numbered(128, 8))
    with pytest.raises(ValueError, match=r"\(32, 4, M, 4, K, E\), not \(2, 1, 2, 32, 4, 4\)"):
        layouts.from_mma_view(swizzled)
