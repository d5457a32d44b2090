"""Results back to the ranks that sent the tokens, and their sums: `combine_rows` (Triton).

How and why: the package.

Legend: R ranks, k top-k (KP, RP: the next power of two), H hidden, room: tokens per rank for which there are
rows. A row is moved in PARTS parts of W words. BACK: what results are sent in, "bf16" (as they are) or "fp8"
(combine_fp8.py); they lie STRIDE bytes apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from turnout.kernels.common.quantize import to_float
from turnout.kernels.nvlink.combine_fp8 import add_up_fp8, push_fp8, read_groups
from turnout.kernels.nvlink.waiting import (
    COMBINE,
    TOKENS,
    anyone,
    at,
    at_word,
    fail,
    failure,
    late,
    look,
    nonzero,
    now,
    pick,
    slices,
)  # fmt: skip


@triton.jit
def halves(word, KIND: tl.constexpr):
    """The two values of 16 bits in a word, as float32; of float32, the one and nothing."""
    if KIND == tl.float32:  # noqa: SIM300
        return word.to(tl.float32, bitcast=True), tl.zeros_like(word).to(tl.float32)
    else:
        low = word.to(tl.int16).to(KIND, bitcast=True)
        high = (word >> 16).to(tl.int16).to(KIND, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def packed(low, high, KIND: tl.constexpr, INTERPRETED: tl.constexpr):
    """The word of two float32, rounded."""
    if KIND == tl.float32:  # noqa: SIM300
        return low.to(tl.int32, bitcast=True)
    else:
        low = to_float(low, KIND, INTERPRETED).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = to_float(high, KIND, INTERPRETED).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return low | high


@triton.jit
def push_results(
    y_ptr, received_ptr, address_R, t, begin, few, epoch, half, y_stride, count_at, meta_at, returned_at,
    results_at, landed_at,
    RANK: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    H: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr,
    BACK: tl.constexpr, ALL_WORDS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """PARTS parts of the results of everyone's token t, but for this rank's own, to whoever sent it."""
    r, k = tl.arange(0, RP), tl.arange(0, KP)
    here = pick(address_R, RANK, RP)
    row_R = t * RANKS + r
    other_R = (r < RANKS) & (r != RANK)
    read = other_R[:, None] & (k < K)[None, :]
    id_RK = tl.load(received_ptr + row_R[:, None] * K + k[None, :], mask=read, other=-1)
    wanted_R = tl.max(id_RK, 1) >= 0
    few_R = wanted_R
    if not ALL_WORDS:
        count_R = tl.load(at(here, count_at + r * 8, tl.int64), mask=other_R, other=0)
        few_R = (count_R & TOKENS) <= few
    back = t * RANKS + RANK
    for part in range(PARTS):
        c = (begin + part) * W + tl.arange(0, W)
        inside = c < ROW
        for turn in tl.static_range(RANK + 1, RANK + RANKS):  # not all ranks to the same one at once
            wanted = pick(wanted_R.to(tl.int32), turn % RANKS, RP) > 0
            from_ptr = y_ptr + (t * RANKS + turn % RANKS) * y_stride
            if BACK == "fp8":
                x = read_groups(from_ptr, begin + part, wanted, ALL_WORDS, H, W // 32)
            else:
                read_c = inside if ALL_WORDS else inside & wanted  # few: sooner than ids are known
                word = tl.load(from_ptr + c, mask=read_c, other=0)
            if wanted:
                to = pick(address_R, turn % RANKS, RP) + back * STRIDE
                start = landed_at
                if not ALL_WORDS:
                    start = tl.where(pick(few_R.to(tl.int32), turn % RANKS, RP) > 0, landed_at, results_at)
                if BACK == "fp8":
                    push_fp8(x, to, start, begin + part, H, W // 32, INTERPRETED)
                else:
                    tl.store(at_word(to, start, tl.int32) + c, nonzero(word), mask=inside)
    if begin == 0:
        meta = meta_at + (half + row_R)[:, None] * (8 * K) + (4 * k)[None, :]
        tl.store(at(here, meta, tl.int32), tl.zeros([RP, KP], tl.int32), mask=read)
        tl.store(at(here, meta + 4 * K, tl.int32), tl.zeros([RP, KP], tl.int32), mask=read)
    if not ALL_WORDS:
        tl.debug_barrier()
        tl.atomic_xchg(
            at(address_R, returned_at + back * 8, tl.int64), tl.zeros([RP], tl.int64) + epoch,
            mask=wanted_R & (few_R == 0), sem="release", scope="sys",
        )  # fmt: skip


@triton.jit
def wait_for_results(
    here, failed_ptr, told_ptr, t, slice_K, epoch, began, limit, returned_at,
    RANK: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """All results of this rank's token t, which come by flags, may be read."""
    r = tl.arange(0, RP)
    due_R = (tl.max((slice_K[None, :] == (r // TP)[:, None]).to(tl.int32), 1) > 0) & (r < RANKS) & (r != RANK)
    polls = 0
    missing = 1
    while missing > 0:
        flag_R = look(here + returned_at + (t * RANKS + r) * 8, due_R, INTERPRETED)
        absent_R = due_R & (flag_R != epoch)
        missing = anyone(tl.max(absent_R.to(tl.int32), 0), INTERPRETED)
        if (missing > 0) & late(polls, began, limit, INTERPRETED):
            peer = tl.min(tl.where(absent_R, r, RP), 0)
            fail(failed_ptr, told_ptr, failure(epoch * 0 + COMBINE, peer, epoch))
            missing = 0
        polls += 1
    tl.debug_barrier()


@triton.jit
def add_up(
    y_ptr, out_ptr, here, failed_ptr, told_ptr, t, first, slice_K, epoch, y_stride, began, limit, start,
    RANK: tl.constexpr, RANKS: tl.constexpr, TP: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr,
    W: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A part of the sum of this rank's own and others' results, which begin at `start`, of its token t.

    In words, they are loaded until all have come, and zeroed.
    """
    c = first * W + tl.arange(0, W)
    inside = c < ROW
    low = tl.zeros([W], tl.float32)
    high = tl.zeros([W], tl.float32)
    polls = 0
    missing = 1
    while missing > 0:
        low = tl.zeros([W], tl.float32)
        high = tl.zeros([W], tl.float32)
        absent = tl.zeros([W], tl.int32)  # who is, plus one
        for other in tl.static_range(RANKS):
            due = tl.max((slice_K == other // TP).to(tl.int32), 0) > 0
            if other == RANK:
                word = tl.load(y_ptr + (t * RANKS + RANK) * y_stride + c, mask=inside & due, other=0)
            else:
                from_ptr = at_word(here + (t * RANKS + other) * STRIDE, start, tl.int32)
                word = tl.load(from_ptr + c, mask=inside & due, other=0, volatile=WORDS)
                if WORDS:
                    absent = tl.where((word == 0) & inside & due, other + 1, absent)
            more_low, more_high = halves(word, KIND)
            low += more_low
            high += more_high
        missing = 0
        if WORDS:
            lacking = tl.max(absent, 0)
            missing = anyone(lacking, INTERPRETED)
            if (missing > 0) & late(polls, began, limit, INTERPRETED):
                fail(failed_ptr, told_ptr, failure(epoch * 0 + COMBINE, lacking - 1, epoch))
                missing = 0
            polls += 1
    tl.store(out_ptr + t * ROW + c, packed(low, high, KIND, INTERPRETED), mask=inside)
    if WORDS:
        for other in tl.static_range(RANKS):
            if other != RANK:
                due = tl.max((slice_K == other // TP).to(tl.int32), 0) > 0
                from_ptr = at_word(here + (t * RANKS + other) * STRIDE, start, tl.int32)
                tl.store(from_ptr + c, tl.zeros([W], tl.int32), mask=inside & due)


@triton.jit(do_not_specialize=["tokens", "room", "few", "limit"], do_not_specialize_on_alignment=["ids_ptr"])
def combine_rows(
    y_ptr, received_ptr, ids_ptr, out_ptr, addresses_ptr, epochs_ptr, failed_ptr, told_ptr, tokens, room, few,
    rows, experts_per_slice, y_stride, limit, counts_at, meta_at, returned_at, results_at, landed_at,
    RANK: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr,
    W: tl.constexpr, LAG: tl.constexpr, KIND: tl.constexpr, BACK: tl.constexpr, WORDS: tl.constexpr,
    ALL_WORDS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Send results back, and sum those of this rank's own tokens as they come.

    y [room * R, H] and out [T, H]: the experts' output, and the sums, of KIND, but for "fp8" as int32 words;
    received int32 [room * R, K]: ids as `dispatch_rows` left them; ids [T, K]: of this rank's tokens.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, RP)
    address_R = tl.load(addresses_ptr + r, mask=r < RANKS, other=0)
    epoch = tl.load(epochs_ptr + 1)
    zero = epoch * 0
    half = (epoch & 1) * rows
    here = pick(address_R, RANK, RP)
    if program == 0:
        tl.store(epochs_ptr, epoch)
    if tl.load(failed_ptr) != 0:
        limit = limit * 0
    began = now(INTERPRETED)
    spread: tl.constexpr = PARTS if ALL_WORDS else 1  # programs to a row
    parts: tl.constexpr = PARTS // spread
    steps = (room * spread + programs - 1) // programs
    for step in range(0, steps + LAG):
        item = step * programs + program
        if item < room * spread:
            push_results(
                y_ptr, received_ptr, address_R, zero + item // spread, item % spread, few, epoch, half,
                y_stride, counts_at + (epoch & 1) * (RANKS * 8), meta_at, returned_at, results_at, landed_at,
                RANK, RANKS, RP, K, KP, H, ROW, STRIDE, parts, W, BACK, ALL_WORDS, INTERPRETED,
            )  # fmt: skip
        due = item - LAG * programs
        if (due >= 0) & (due < tokens * spread):
            t = zero + due // spread
            _, slice_K = slices(ids_ptr, t, True, experts_per_slice, K, KP)
            if not WORDS:
                wait_for_results(
                    here, failed_ptr, told_ptr, t, slice_K, epoch, began, limit, returned_at,
                    RANK, RANKS, RP, TP, INTERPRETED,
                )  # fmt: skip
            start = landed_at if WORDS else results_at
            for part in range(parts):
                first = due % spread + part
                if BACK == "fp8":
                    add_up_fp8(
                        y_ptr, out_ptr, here, failed_ptr, told_ptr, t, first, slice_K, epoch, y_stride,
                        began, limit, start, RANK, RANKS, TP, H, STRIDE, W // 32, KIND, WORDS, INTERPRETED,
                    )  # fmt: skip
                else:
                    add_up(
                        y_ptr, out_ptr, here, failed_ptr, told_ptr, t, first, slice_K, epoch, y_stride,
                        began, limit, start, RANK, RANKS, TP, ROW, STRIDE, W, KIND, WORDS, INTERPRETED,
                    )  # fmt: skip
