"""Activations in e4m3 with a float32 scale per 128 columns, before a GEMM (Triton).

Legend: R rows, K columns, P pairs (token, expert), T tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.hopper.sort import place_pairs


@triton.jit
def quantize_groups(x):
    """x float32 [., 128] -> e4m3 [., 128], and amax / 448, or 1 where x is zero.

    By reciprocals, so most scales are an ulp off `formats.fp8`'s. Rows in bfloat16 have so many ties that
    this alone takes 0.2 % of their codes to the other neighbour, and a layer 1.5e-2 away from one that is
    emulated by division; both are as far from exact products, 4.2e-2.
    """
    amax = tl.max(tl.abs(x), 1)
    scale = tl.where(amax > 0, amax * (1 / 448), 1.0)
    q = tl.minimum(tl.maximum(x * (1 / scale)[:, None], -448.0), 448.0)
    return q.to(tl.float8e4nv), scale


@triton.jit
def _quantize_block(
    block, x_ptr, q_ptr, scale_ptr, rows, K, x_stride, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    g = block * BLOCK + tl.arange(0, BLOCK)
    row = (g // GROUPS).to(tl.int64)
    column = (g % GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    exists = row < rows
    at = x_ptr + row[:, None] * x_stride + column
    q, scale = quantize_groups(tl.load(at, mask=exists[:, None] & (column < K), other=0.0).to(tl.float32))
    tl.store(q_ptr + row[:, None] * (GROUPS * 128) + column, q, mask=exists[:, None])
    tl.store(scale_ptr + row * GROUPS + g % GROUPS, scale, mask=exists)


@triton.jit(do_not_specialize=["rows"])
def quantize_rows(
    x_ptr, q_ptr, scale_ptr, rows, K, x_stride, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """q e4m3 [rows, 128 GROUPS], scale float32 [rows, GROUPS] of x [rows, K]; beyond K there are zeros."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _quantize_block(tl.program_id(0), x_ptr, q_ptr, scale_ptr, rows, K, x_stride, GROUPS, BLOCK)


@triton.jit(do_not_specialize=["P", "tile_tokens", "programs", "rows"])
def sort_and_quantize(
    ids_ptr, counts_ptr, order_ptr, tiles_ptr, x_ptr, q_ptr, scale_ptr,
    P, first, E, tile_tokens, programs, rows, K, x_stride,
    SORTED: tl.constexpr, EP: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`place_pairs` by the first `programs`, SORTED pairs each, and `quantize_rows` by the others, in the
    same launch, as neither waits for the other: 1 to 2 % of a layer (gemm_fp8.py).
    """
    program = tl.program_id(0)
    if program < programs:
        place_pairs(
            ids_ptr, counts_ptr, order_ptr, order_ptr, tiles_ptr, P, first, E, tile_tokens, programs,
            SORTED, EP, COUNT, False, False, PDL,
        )  # fmt: skip
    else:
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        _quantize_block(program - programs, x_ptr, q_ptr, scale_ptr, rows, K, x_stride, GROUPS, BLOCK)


@triton.jit
def quantize_places(
    x_ptr, place_ptr, q_ptr, scale_ptr, K, x_stride,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q e4m3 [P, K], scale float32 [P, K / 128]: x [T, K], a row to every place of its token (sort.py).

    K, a multiple of 128, is at most BLOCK; a program takes a token, and none that has no place.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    last = -1
    for j in tl.static_range(TOP_K):
        last = tl.maximum(last, tl.load(place_ptr + token * TOP_K + j))
    if last >= 0:
        g = tl.arange(0, BLOCK // 128)
        c = g[:, None] * 128 + tl.arange(0, 128)[None, :]
        q, scale = quantize_groups(
            tl.load(x_ptr + token.to(tl.int64) * x_stride + c, mask=c < K, other=0.0).to(tl.float32)
        )
        for j in tl.static_range(TOP_K):
            row = tl.load(place_ptr + token * TOP_K + j).to(tl.int64)
            if row >= 0:
                tl.store(q_ptr + row * K + c, q, mask=c < K)
                tl.store(scale_ptr + row * (K // 128) + g, scale, mask=g < K // 128)
