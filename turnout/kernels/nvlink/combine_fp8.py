"""Results back in FP8, a float32 scale per 128 columns: a part of a row sent, and of a token's sum (Triton).

A row is H bytes of values, then its scales. In words (the package says when), zeros at a word's end are sent
as -0; scales are positive. Only what is sent is rounded: a rank's own part of a sum is as its experts left
it.

Legend: R ranks, H hidden, G groups of 128 columns; a row takes STRIDE bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from turnout.kernels.common.quantize import quantize_fp8, to_float
from turnout.kernels.nvlink.waiting import COMBINE, anyone, at, at_word, fail, failure, late

GROUP = tl.constexpr(128)


@triton.jit
def read_groups(y_ptr, first, wanted, EARLY: tl.constexpr, H: tl.constexpr, G: tl.constexpr):
    """float32 [G, 128]: a part of the row at y if it is wanted; EARLY: sooner than that is known."""
    c = (first * G + tl.arange(0, G))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    read_c = c < H if EARLY else (c < H) & wanted
    return tl.load(y_ptr + c, mask=read_c, other=0.0).to(tl.float32)


@triton.jit
def push_fp8(x, to, start, first, H: tl.constexpr, G: tl.constexpr, INTERPRETED: tl.constexpr):
    """Part x [G, 128] of a row, quantised, to the row at to + start."""
    g = first * G + tl.arange(0, G)
    c = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    q, scale = quantize_fp8(x, INTERPRETED)
    zero: tl.constexpr = 128
    q = tl.where(((c & 3) == 3) & (q == 0), zero, q).to(tl.uint8)
    tl.store(at_word(to, start, tl.uint8) + c, q, mask=c < H)
    tl.store(at(to, start + H, tl.float32) + g, scale, mask=g < H // GROUP)


@triton.jit
def wait_for_fp8(
    here, failed_ptr, told_ptr, t, first, slice_K, epoch, began, limit, start,
    RANK: tl.constexpr, RANKS: tl.constexpr, TP: tl.constexpr, H: tl.constexpr, STRIDE: tl.constexpr,
    G: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """G groups of all results of this rank's token t, which come in words, may be read."""
    c = first * (G * GROUP // 4) + tl.arange(0, G * GROUP // 4)
    inside = c < H // 4
    polls = 0
    missing = 1
    while missing > 0:
        absent = tl.zeros([G * GROUP // 4], tl.int32)  # who is, plus one
        for other in tl.static_range(RANKS):
            if other != RANK:
                due = tl.max((slice_K == other // TP).to(tl.int32), 0) > 0
                from_ptr = at_word(here + (t * RANKS + other) * STRIDE, start, tl.int32)
                word = tl.load(from_ptr + c, mask=inside & due, other=1, volatile=True)
                scale = tl.load(from_ptr + H // 4 + c // 32, mask=inside & due, other=1, volatile=True)
                absent = tl.where((word == 0) | (scale == 0), other + 1, absent)
        lacking = tl.max(absent, 0)
        missing = anyone(lacking, INTERPRETED)
        if (missing > 0) & late(polls, began, limit, INTERPRETED):
            fail(failed_ptr, told_ptr, failure(epoch * 0 + COMBINE, lacking - 1, epoch))
            missing = 0
        polls += 1


@triton.jit
def add_up_fp8(
    y_ptr, out_ptr, here, failed_ptr, told_ptr, t, first, slice_K, epoch, y_stride, began, limit, start,
    RANK: tl.constexpr, RANKS: tl.constexpr, TP: tl.constexpr, H: tl.constexpr, STRIDE: tl.constexpr,
    G: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """G groups of the sum of this rank's own and others' results, which begin at `start`, of its token t.

    What came in words is zeroed.
    """
    if WORDS:
        wait_for_fp8(
            here, failed_ptr, told_ptr, t, first, slice_K, epoch, began, limit, start,
            RANK, RANKS, TP, H, STRIDE, G, INTERPRETED,
        )  # fmt: skip
    g = first * G + tl.arange(0, G)
    c = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    total = tl.zeros([G, GROUP], tl.float32)
    for other in tl.static_range(RANKS):
        due = tl.max((slice_K == other // TP).to(tl.int32), 0) > 0
        if other == RANK:
            own_ptr = y_ptr + (t * RANKS + RANK) * y_stride
            total += tl.load(own_ptr + c, mask=(c < H) & due, other=0.0).to(tl.float32)
        else:
            row = here + (t * RANKS + other) * STRIDE
            q = tl.load(at_word(row, start, tl.uint8) + c, mask=(c < H) & due, other=0, volatile=WORDS)
            scale_ptr = at(row, start + H, tl.float32) + g
            scale = tl.load(scale_ptr, mask=(g < H // GROUP) & due, other=0.0, volatile=WORDS)
            total += q.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
    tl.store(out_ptr + t * H + c, to_float(total, KIND, INTERPRETED), mask=c < H)
    if WORDS:
        tl.debug_barrier()  # all have read what any of them zeroes
        for other in tl.static_range(RANKS):
            if other != RANK:
                due = tl.max((slice_K == other // TP).to(tl.int32), 0) > 0
                row = here + (t * RANKS + other) * STRIDE
                none = tl.zeros([G, GROUP], tl.uint8)
                tl.store(at_word(row, start, tl.uint8) + c, none, mask=(c < H) & due)
                scale_ptr = at(row, start + H, tl.float32) + g
                tl.store(scale_ptr, tl.zeros([G], tl.float32), mask=(g < H // GROUP) & due)
