"""Rows to e4m3 with one scale each, for the GEMM of gemm_w4a8.py (Triton).

Its first input is tokens, which several experts take: each is quantised once, and stored to as many rows of
that GEMM's input. 16384 tokens of GPT-OSS-20B take 78 us on an H200; gathered row by row they took 161.

Legend: R rows, T tokens, K columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.quantize import to_e4m3


@triton.jit
def _quantize(x_ptr, row, exists, K, x_stride, PADDED: tl.constexpr, INTERPRETED: tl.constexpr):
    """e4m3 [., PADDED], zeros from K on, and scales, amax / 448 or 1, of the rows of x that exist."""
    column = tl.arange(0, PADDED)[None, :]
    at = x_ptr + row.to(tl.int64)[:, None] * x_stride + column
    x = tl.load(at, mask=exists[:, None] & (column < K), other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), 1)
    scale = tl.where(amax > 0, amax * (1 / 448), 1.0)
    return to_e4m3(x * (1 / scale)[:, None], INTERPRETED), scale


@triton.jit
def _store(q, scale, q_ptr, scale_ptr, row, exists, COLUMNS: tl.constexpr):
    column = tl.arange(0, q.shape[1])[None, :]
    tl.store(
        q_ptr + row.to(tl.int64)[:, None] * COLUMNS + column, q, mask=exists[:, None] & (column < COLUMNS)
    )
    tl.store(scale_ptr + row, scale, mask=exists)


@triton.jit(do_not_specialize=["rows"])
def quantize_rows(
    x_ptr, tiles_ptr, q_ptr, scale_ptr, rows, K, x_stride,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, SORTED: tl.constexpr, PDL: tl.constexpr,
    INTERPRETED: tl.constexpr = False,
):  # fmt: skip
    """q e4m3 [R, COLUMNS], zeros from K on, and scale float32 [R] of rows of x [R, K].

    SORTED: only the first tiles[1] of `rows` exist. PADDED: a power of two, no less than COLUMNS; ROWS at a
    time.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = rows
    if SORTED:
        total = tl.load(tiles_ptr + 1)
    first = tl.program_id(0) * ROWS
    while first < total:
        row = first + tl.arange(0, ROWS)
        q, scale = _quantize(x_ptr, row, row < total, K, x_stride, PADDED, INTERPRETED)
        _store(q, scale, q_ptr, scale_ptr, row, row < total, COLUMNS)
        first += tl.num_programs(0) * ROWS


@triton.jit(do_not_specialize=["tokens"])
def quantize_tokens(
    x_ptr, place_ptr, q_ptr, scale_ptr, tokens, K, x_stride,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
    INTERPRETED: tl.constexpr = False,
):  # fmt: skip
    """The same of x [T, K], token t to the rows place[t, :] of q and scale that are not below 0.

    place int32 [T, TOP_K]; ROWS tokens a program.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = token < tokens
    q, scale = _quantize(x_ptr, token, exists, K, x_stride, PADDED, INTERPRETED)
    for j in tl.static_range(TOP_K):
        row = tl.load(place_ptr + token * TOP_K + j, mask=exists, other=-1)
        _store(q, scale, q_ptr, scale_ptr, row, row >= 0, COLUMNS)
