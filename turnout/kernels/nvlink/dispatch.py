"""Tokens to the ranks that hold their experts: `dispatch_rows` (Triton). How and why: the package.

Legend: R ranks, k top-k (KP, RP: the next power of two), H hidden, room: tokens per rank for which there are
rows. A row is moved in PARTS parts of W words and S words of scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from turnout.kernels.common.quantize import quantize_fp8, quantize_nvfp4
from turnout.kernels.nvlink.waiting import (
    CAPACITY,
    DISPATCH,
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
def push_words(
    x_ptr, address_R, slice_K, first, row, hidden_at, landing_at, real,
    RANK: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, ROW: tl.constexpr,
    STRIDE: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Words [first * W, + W) of a token at x, as it is, to row `row` of all that want it."""
    c = first * W + tl.arange(0, W)
    inside = c < ROW
    word = tl.load(x_ptr + c, mask=inside & real, other=0)
    for turn in tl.static_range(RANK + 1, RANK + 1 + RANKS):  # not all ranks to the same one at once
        if tl.max((slice_K == turn % RANKS // TP).to(tl.int32), 0) > 0:
            to = pick(address_R, turn % RANKS, RP)
            if WORDS and turn % RANKS != RANK:
                tl.store(at_word(to, landing_at + row * STRIDE, tl.int32) + c, nonzero(word), mask=inside)
            else:
                tl.store(at_word(to, hidden_at + row * (ROW * 4), tl.int32) + c, word, mask=inside)


@triton.jit
def push_quantized(
    x_ptr, scale_ptr, address_R, slice_K, first, row, hidden_at, scales_at, landing_at, real,
    RANK: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, H: tl.constexpr,
    STRIDE: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr, WORDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Columns [first * COLUMNS, + COLUMNS) of the token at x, quantised, to row `row` of all that want it."""
    group: tl.constexpr = 128 if FORMAT == "fp8" else 16
    packed: tl.constexpr = group if FORMAT == "fp8" else group // 2  # bytes
    kind: tl.constexpr = tl.float32 if FORMAT == "fp8" else tl.uint8
    size: tl.constexpr = 4 if FORMAT == "fp8" else 1
    data: tl.constexpr = H // group * packed
    scales: tl.constexpr = H // group * size
    g = first * (COLUMNS // group) + tl.arange(0, COLUMNS // group)
    c = g[:, None] * group + tl.arange(0, group)[None, :]
    x = tl.load(x_ptr + c, mask=(c < H) & real, other=0.0).to(tl.float32)
    if FORMAT == "fp8":
        q, scale = quantize_fp8(x, INTERPRETED)
    else:
        q, scale = quantize_nvfp4(x, tl.load(scale_ptr), INTERPRETED)
    b = g[:, None] * packed + tl.arange(0, packed)[None, :]
    for turn in tl.static_range(RANK + 1, RANK + 1 + RANKS):  # not all ranks to the same one at once
        if tl.max((slice_K == turn % RANKS // TP).to(tl.int32), 0) > 0:
            to = pick(address_R, turn % RANKS, RP)
            if WORDS and turn % RANKS != RANK:  # a word's last value, if zero, as -0
                start = to + row * STRIDE
                last = (b & 3) == 3
                zero: tl.constexpr = 128
                if FORMAT == "fp8":
                    sent = tl.where(last & (q == 0), zero, q)
                    sent_scale = scale  # positive
                else:
                    sent = tl.where(last & ((q & 0xF0) == 0), q | zero, q)
                    sent_scale = tl.where(((g & 3) == 3) & (scale == 0), zero, scale)
                tl.store(at_word(start, landing_at, tl.uint8) + b, sent.to(tl.uint8), mask=b < data)
                s_ptr = at(start, landing_at + data, kind)
                tl.store(s_ptr + g, sent_scale.to(kind), mask=g < H // group)
            else:
                tl.store(at_word(to, hidden_at + row * data, tl.uint8) + b, q, mask=b < data)
                tl.store(at(to, scales_at + row * scales, kind) + g, scale, mask=g < H // group)


@triton.jit
def take(
    here, out_ids_ptr, out_weights_ptr, failed_ptr, told_ptr, t, source, first, room, epoch, half, began,
    limit, count_at, meta_at, hidden_at, scales_at, landing_at,
    RANKS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROW: tl.constexpr, SCALE_ROW: tl.constexpr,
    STRIDE: tl.constexpr, W: tl.constexpr, S: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Wait for a part of a row that comes in words, if any does, and copy it to where it is read.

    ROW, SCALE_ROW: words of a whole row's values and scales; STRIDE: bytes from one that lands to the next.
    """
    k, s = tl.arange(0, KP), first * S + tl.arange(0, S)
    c = first * W + tl.arange(0, W)
    row = t * RANKS + source
    meta_ptr = at(here, meta_at + (half + row) * (8 * K), tl.int32)
    word_ptr = at_word(here + row * STRIDE, landing_at, tl.int32)
    id_K = tl.zeros([KP], tl.int32)
    weight_K = tl.zeros([KP], tl.int32)
    word = tl.zeros([W], tl.int32)
    wanted = t < 0
    polls = 0
    missing = 1
    while missing > 0:
        count = tl.load(at(here, count_at + source * 8, tl.int64), volatile=True)
        id_K = tl.load(meta_ptr + k, mask=k < K, other=1, volatile=True)
        weight_K = tl.load(meta_ptr + K + k, mask=k < K, other=1, volatile=True)
        word = tl.load(word_ptr + c, mask=c < ROW, other=1, volatile=True)
        lacking = tl.max((word == 0).to(tl.int32), 0) > 0
        if SCALE_ROW > 0:
            scale = tl.load(word_ptr + ROW + s, mask=s < SCALE_ROW, other=1, volatile=True)
            lacking = lacking | (tl.max((scale == 0).to(tl.int32), 0) > 0)
        counted = (count >> 24) == epoch
        sent = counted & (t < (count & TOKENS)) & ((count & TOKENS) <= room)
        untold = tl.max(((id_K == 0) | (weight_K == 0)).to(tl.int32), 0) > 0
        wanted = sent & (untold == 0) & (tl.max(id_K, 0) > 1)
        absent = (counted == 0) | (sent & untold) | (wanted & lacking)
        missing = anyone(absent.to(tl.int32), INTERPRETED)
        if (missing > 0) & late(polls, began, limit, INTERPRETED):
            fail(failed_ptr, told_ptr, failure(epoch * 0 + DISPATCH, source, epoch))
            wanted = wanted & False
            missing = 0
        polls += 1
    if wanted:
        tl.store(at_word(here + row * (4 * ROW), hidden_at, tl.int32) + c, word, mask=c < ROW)
        tl.store(word_ptr + c, tl.zeros([W], tl.int32), mask=c < ROW)
        if SCALE_ROW > 0:
            # Scales are not negative: what looks so is a zero that was sent.
            scale_ptr = at(here, scales_at + row * (4 * SCALE_ROW), tl.int32)
            scale = tl.load(word_ptr + ROW + s, mask=s < SCALE_ROW, other=1, volatile=True)
            tl.store(scale_ptr + s, scale & 0x7FFFFFFF, mask=s < SCALE_ROW)
            tl.store(word_ptr + ROW + s, tl.zeros([S], tl.int32), mask=s < SCALE_ROW)
    if first == 0:
        put_meta(out_ids_ptr, out_weights_ptr, row, id_K, weight_K, wanted & (k < K), k, K)


@triton.jit
def push_meta(
    weights_ptr, out_ids_ptr, out_weights_ptr, address_R, r, k, id_K, slice_K, held_RK, t, row, half, meta_at,
    real, RANK: tl.constexpr, RANKS: tl.constexpr, TP: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Ids and weights of token t to everyone, and to this rank's own batch: those of experts held there."""
    weight_K = tl.load(weights_ptr + t * K + k, mask=(k < K) & real, other=0)
    put_meta(out_ids_ptr, out_weights_ptr, row, id_K + 2, weight_K, slice_K == RANK // TP, k, K)
    to_RK = address_R[:, None] + meta_at + (half + row) * (8 * K) + (4 * k)[None, :]
    sent_RK = ((r < RANKS) & (r != RANK))[:, None] & (k < K)[None, :] & real
    tl.store(at(to_RK, 0, tl.int32), tl.where(held_RK, id_K[None, :] + 2, 1), mask=sent_RK)
    tl.store(at(to_RK, 4 * K, tl.int32), nonzero(tl.where(held_RK, weight_K[None, :], 0)), mask=sent_RK)


@triton.jit
def put_meta(out_ids_ptr, out_weights_ptr, row, id_K, weight_K, wanted, k, K: tl.constexpr):
    """Ids and weights as they were sent, to those of a batch, of one row or several."""
    held = wanted & (id_K > 1)
    tl.store(out_ids_ptr + row * K + k, tl.where(held, id_K - 2, -1), mask=(k < K) & (row >= 0))
    weight = tl.where(held, weight_K.to(tl.float32, bitcast=True), 0.0)
    tl.store(out_weights_ptr + row * K + k, weight, mask=(k < K) & (row >= 0))


@triton.jit(
    do_not_specialize=["tokens", "room", "few", "limit"],
    do_not_specialize_on_alignment=["ids_ptr", "weights_ptr", "scale_ptr"],
)
def dispatch_rows(
    x_ptr, ids_ptr, weights_ptr, scale_ptr, addresses_ptr, epochs_ptr, failed_ptr, told_ptr, out_ids_ptr,
    out_weights_ptr, tokens, room, few, rows, experts_per_slice, x_stride, limit, counts_at, meta_at,
    arrived_at, hidden_at, scales_at, landing_at,
    RANK: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, SCALE_ROW: tl.constexpr, STRIDE: tl.constexpr,
    PARTS: tl.constexpr, W: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    WORDS: tl.constexpr, ALL_WORDS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Send this rank's tokens and wait for everyone's.

    x [T, H], in bf16 as int32 words; ids and weights (float32's bits) int32 [T, K]; out_ids and out_weights
    [room * R, K]. TP ranks in a row hold the same experts. WORDS: this rank has no more than `few` tokens;
    ALL_WORDS: nor has any other."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    r, k = tl.arange(0, RP), tl.arange(0, KP)
    address_R = tl.load(addresses_ptr + r, mask=r < RANKS, other=0)
    epoch = tl.load(epochs_ptr) + 1
    zero = epoch * 0  # places are counted in 64 bits
    half = (epoch & 1) * rows
    count_at = counts_at + (epoch & 1) * (RANKS * 8)
    here = pick(address_R, RANK, RP)
    if program == 0:
        tl.store(epochs_ptr + 1, epoch)
        word_R = tl.zeros([RP], tl.int64) + ((epoch << 24) | tokens)
        tl.store(at(address_R, count_at + RANK * 8, tl.int64), word_R, mask=r < RANKS)
    spread: tl.constexpr = PARTS if ALL_WORDS else 1  # programs to a row
    for item in range(program, room * spread, programs):
        send_row(
            x_ptr, ids_ptr, weights_ptr, scale_ptr, out_ids_ptr, out_weights_ptr, address_R, r, k,
            zero + item // spread, item % spread, tokens, experts_per_slice, x_stride, epoch, half,
            meta_at, arrived_at, hidden_at, scales_at, landing_at,
            RANK, RANKS, RP, TP, K, KP, H, ROW, STRIDE, PARTS // spread, W, FORMAT, WORDS, INTERPRETED,
        )  # fmt: skip
    if tl.load(failed_ptr) != 0:
        limit = limit * 0
    began = now(INTERPRETED)
    others: tl.constexpr = RANKS - 1
    if RANKS == 1:
        pass
    elif ALL_WORDS:
        for item in range(program, room * others * PARTS, programs):
            place = zero + item // PARTS
            source = place % others
            take(
                here, out_ids_ptr, out_weights_ptr, failed_ptr, told_ptr, place // others,
                source + (source >= RANK), item % PARTS, room, epoch, half, began, limit, count_at, meta_at,
                hidden_at, scales_at, landing_at, RANKS, K, KP, ROW, SCALE_ROW, STRIDE, W, S, INTERPRETED,
            )  # fmt: skip
    else:
        for block in range(program, (room * others + BLOCK - 1) // BLOCK, programs):
            wait_for_rows(
                here, out_ids_ptr, out_weights_ptr, failed_ptr, told_ptr, zero + block, room, few, epoch,
                half, began, limit, count_at, meta_at, arrived_at, hidden_at, scales_at, landing_at,
                RANK, RANKS, K, KP, ROW, SCALE_ROW, STRIDE, PARTS, W, S, BLOCK, INTERPRETED,
            )  # fmt: skip
    if program == 0:
        wait_for_counts(
            here, failed_ptr, told_ptr, room, epoch, began, limit, count_at, RANKS, RP, INTERPRETED
        )


@triton.jit
def send_row(
    x_ptr, ids_ptr, weights_ptr, scale_ptr, out_ids_ptr, out_weights_ptr, address_R, r, k, t, begin,
    tokens, experts_per_slice, x_stride, epoch, half, meta_at, arrived_at, hidden_at, scales_at, landing_at,
    RANK: tl.constexpr, RANKS: tl.constexpr, RP: tl.constexpr, TP: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr,
    W: tl.constexpr, FORMAT: tl.constexpr, WORDS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """PARTS of token t (int64), from part `begin` on, to all that hold its experts; with the first of them
    its ids and weights, to everyone. r, k: numbers of ranks and of a token's experts."""
    real = t < tokens
    row = t * RANKS + RANK
    id_K, slice_K = slices(ids_ptr, t, real, experts_per_slice, K, KP)
    for part in range(PARTS):
        first = begin + part
        if FORMAT == "bf16":
            push_words(
                x_ptr + t * x_stride, address_R, slice_K, first, row, hidden_at, landing_at, real,
                RANK, RANKS, RP, TP, ROW, STRIDE, W, WORDS,
            )  # fmt: skip
        else:
            push_quantized(
                x_ptr + t * x_stride, scale_ptr, address_R, slice_K, first, row, hidden_at, scales_at,
                landing_at, real, RANK, RANKS, RP, TP, H, STRIDE, W * (4 if FORMAT == "fp8" else 8),
                FORMAT, WORDS, INTERPRETED,
            )  # fmt: skip
    held_RK = (slice_K[None, :] == (r // TP)[:, None]) & (r < RANKS)[:, None]
    if begin == 0:
        push_meta(
            weights_ptr, out_ids_ptr, out_weights_ptr, address_R, r, k, id_K, slice_K, held_RK, t, row,
            half, meta_at, real, RANK, RANKS, TP, K,
        )  # fmt: skip
    if not WORDS:
        tl.debug_barrier()
        wanted_R = (tl.max(held_RK.to(tl.int32), 1) > 0) & (r != RANK)
        tl.atomic_xchg(
            at(address_R, arrived_at + row * 8, tl.int64), tl.zeros([RP], tl.int64) + epoch,
            mask=wanted_R, sem="release", scope="sys",
        )  # fmt: skip


@triton.jit
def wait_for_counts(
    here, failed_ptr, told_ptr, room, epoch, began, limit, count_at,
    RANKS: tl.constexpr, RP: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """All ranks have begun, and none brings more than there is room for."""
    r = tl.arange(0, RP)
    polls = 0
    missing = 1
    word_R = tl.zeros([RP], tl.int64)
    while missing > 0:
        word_R = tl.load(at(here, count_at + r * 8, tl.int64), mask=r < RANKS, other=0, volatile=True)
        absent_R = ((word_R >> 24) != epoch) & (r < RANKS)
        missing = anyone(tl.max(absent_R.to(tl.int32), 0), INTERPRETED)
        if (missing > 0) & late(polls, began, limit, INTERPRETED):
            peer = tl.min(tl.where(absent_R, r, RP), 0)
            fail(failed_ptr, told_ptr, failure(epoch * 0 + DISPATCH, peer, epoch))
            missing = 0
        polls += 1
    count_R = tl.where(((word_R >> 24) == epoch) & (r < RANKS), word_R & TOKENS, 0)
    most = tl.max(count_R, 0)
    if most > room:
        peer = tl.min(tl.where(count_R == most, r, RP), 0)
        fail(failed_ptr, told_ptr, failure(epoch * 0 + CAPACITY, peer, most))


@triton.jit
def wait_for_rows(
    here, out_ids_ptr, out_weights_ptr, failed_ptr, told_ptr, block, room, few, epoch, half, began, limit,
    count_at, meta_at, arrived_at, hidden_at, scales_at, landing_at,
    RANK: tl.constexpr, RANKS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROW: tl.constexpr,
    SCALE_ROW: tl.constexpr, STRIDE: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of others: those that come by flags wait together, those in words one by one."""
    others: tl.constexpr = RANKS - 1
    k = tl.arange(0, KP)
    place = block * BLOCK + tl.arange(0, BLOCK)
    t, source = place // others, place % others
    source += source >= RANK
    exists = t < room
    row = t * RANKS + source
    meta_ptr = at(here, meta_at + (half + row)[:, None] * (8 * K) + (4 * k)[None, :], tl.int32)
    read = exists[:, None] & (k < K)[None, :]
    polls = 0
    missing = 1
    while missing > 0:
        count = tl.load(at(here, count_at + source * 8, tl.int64), mask=exists, other=0, volatile=True)
        id_BK = tl.load(meta_ptr, mask=read, other=1, volatile=True)
        weight_BK = tl.load(meta_ptr + K, mask=read, other=1, volatile=True)
        flag = look(here + arrived_at + row * 8, exists, INTERPRETED)
        counted = (count >> 24) == epoch
        sent = exists & counted & (t < (count & TOKENS)) & ((count & TOKENS) <= room)
        untold = tl.max(((id_BK == 0) | (weight_BK == 0)).to(tl.int32), 1) > 0
        wanted = sent & (untold == 0) & (tl.max(id_BK, 1) > 1)
        lacking = ((count & TOKENS) > few) & (flag != epoch)
        absent = exists & ((counted == 0) | (sent & untold) | (wanted & lacking))
        missing = anyone(tl.max(absent.to(tl.int32), 0), INTERPRETED)
        if (missing > 0) & late(polls, began, limit, INTERPRETED):
            peer = tl.min(tl.where(absent, source, RANKS), 0)
            fail(failed_ptr, told_ptr, failure(epoch * 0 + DISPATCH, peer, epoch))
            missing = 0
        polls += 1
    count = tl.load(at(here, count_at + source * 8, tl.int64), mask=exists, other=0, volatile=True)
    sent = exists & ((count >> 24) == epoch) & (t < (count & TOKENS)) & ((count & TOKENS) <= room)
    id_BK = tl.load(meta_ptr, mask=read, other=1, volatile=True)
    weight_BK = tl.load(meta_ptr + K, mask=read, other=1, volatile=True)
    put_meta(
        out_ids_ptr, out_weights_ptr, tl.where(exists, row, -1)[:, None], id_BK, weight_BK,
        sent[:, None] & read, k[None, :], K,
    )  # fmt: skip
    in_words = sent & ((count & TOKENS) <= few) & (tl.max(id_BK, 1) > 1)
    if tl.max(in_words.to(tl.int32), 0) > 0:
        for i in range(BLOCK):
            if tl.max((in_words & (tl.arange(0, BLOCK) == i)).to(tl.int32), 0) > 0:
                at_i = block * BLOCK + i
                from_i = at_i % others
                for first in range(PARTS):
                    take(
                        here, out_ids_ptr, out_weights_ptr, failed_ptr, told_ptr, at_i // others,
                        from_i + (from_i >= RANK), first, room, epoch, half, began, limit, count_at,
                        meta_at, hidden_at, scales_at, landing_at, RANKS, K, KP, ROW, SCALE_ROW, STRIDE, W, S,
                        INTERPRETED,
                    )  # fmt: skip
