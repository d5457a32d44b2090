"""Quantised rows put in the order of experts, for kernels that let the TMA load them (Triton).

The TMA loads rows that follow each other, so rows of tokens are copied to where their experts are; rows that
lie there already are only quantised. Scales are turned around: those of one group follow each other.

Legend: R sorted rows (token, expert), K columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.expert_gemm_fp8 import quantize_groups


@triton.jit
def gather_sorted(
    q_ptr, scale_ptr, order_ptr, tiles_ptr, to_ptr, to_scale_ptr, scale_stride, top_k,
    WORDS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PADDED: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows of q, WORDS int64 each, and their scales [., GROUPS] in the order of experts: sorted row r is that
    of token order[r] / top_k. Scales are turned to [GROUPS, scale_stride]. tiles[1]: how many rows.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(tiles_ptr + 1)
    first = tl.program_id(0) * ROWS
    while first < total:
        row = first + tl.arange(0, ROWS)
        exists = row < total
        source = (tl.load(order_ptr + row, mask=exists, other=0) // top_k).to(tl.int64)
        for at in range(0, WORDS, 128):
            c = at + tl.arange(0, 128)[None, :]
            held = exists[:, None] & (c < WORDS)
            word = tl.load(q_ptr + source[:, None] * WORDS + c, mask=held)
            tl.store(to_ptr + row.to(tl.int64)[:, None] * WORDS + c, word, mask=held)
        g = tl.arange(0, GROUPS_PADDED)[None, :]
        held = exists[:, None] & (g < GROUPS)
        scale = tl.load(scale_ptr + source[:, None] * GROUPS + g, mask=held)
        tl.store(to_scale_ptr + g.to(tl.int64) * scale_stride + row[:, None], scale, mask=held)
        first += tl.num_programs(0) * ROWS


@triton.jit
def quantize_sorted(
    x_ptr, tiles_ptr, q_ptr, scale_ptr, K, x_stride, scale_stride,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `quantize_rows`, of the first tiles[1] rows, with scales [GROUPS, scale_stride]."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(tiles_ptr + 1) * GROUPS
    first = tl.program_id(0) * BLOCK
    while first < total:
        g = first + tl.arange(0, BLOCK)
        row = g // GROUPS
        group = g % GROUPS
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        exists = g < total
        at = x_ptr + row.to(tl.int64)[:, None] * x_stride + column
        held = exists[:, None] & (column < K)
        q, scale = quantize_groups(tl.load(at, mask=held, other=0.0).to(tl.float32))
        tl.store(q_ptr + row.to(tl.int64)[:, None] * (GROUPS * 128) + column, q, mask=exists[:, None])
        tl.store(scale_ptr + group.to(tl.int64) * scale_stride + row, scale, mask=exists)
        first += tl.num_programs(0) * BLOCK
