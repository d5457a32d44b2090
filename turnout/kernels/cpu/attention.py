"""Causal attention over pages of keys and values, for tokens that decode and for chunks of prompts alike.

Blocks of 16 tokens hold their keys transposed, [D, 16], and their values as panels [D / 16, 16, 16], so that
scores and outputs are products with panels (tiles.py), read where they lie. Up to six query rows (tokens and
heads of one KV head) go together. Scores of SPAN tokens are kept, then the softmax moves on: a maximum, sums
and outputs that are scaled down when a larger one is met. Spans begin at multiples of SPAN whatever the
chunk, so that a token gets the same bits in any batch and however its prompt was cut.

A token that decodes reads all of its context once, so what comes next, values while scores are made and then
the next head's keys, is fetched meanwhile. Of 32 tokens with 174 and 1024 positions each, thread time of a
layer on a shared AMD EPYC, us, before and after: 8 heads and 4 KV heads of 32: 570 and 410, 3200 and 2390; 16
and 4 of 64: 1400 and 1200, 7500 and 5700. With heads of 128 it gained nothing and cost up to 10 %, for
processors see by themselves that keys of a block, two pages long, go on.

Nothing behind the last token of a context, nor in a block wholly below its window, is used, not even
multiplied by zero: pages keep what others left. The softmax begins with the sink: a maximum, and a sum of 1.

Legend: N tokens of the step, C chunks of it, Hq/Hkv query/KV heads, G = Hq / Hkv, D head size, a multiple of
16, M groups of query rows, P pages of a row of the page table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnout.kernels.cpu.jit import inline, kernel
from turnout.kernels.cpu.phases import begin as begin_phase
from turnout.kernels.cpu.phases import end as end_phase
from turnout.kernels.cpu.team import floats, integers, phased
from turnout.kernels.cpu.threads import threads_for
from turnout.kernels.cpu.tiles import ROWS, products_f32, products_onto
from turnout.kernels.cpu.vectors import (
    exp,
    fetch,
    first_lanes,
    get_f32,
    get_i64,
    larger,
    largest,
    load,
    put_f32,
    put_i64,
    splat,
    stack,
    store,
    take,
    total,
    zeros,
)

BLOCK = 16  # tokens whose keys are one panel
SPAN = 256  # tokens between two steps of the softmax
MAX_HEAD = 256
FETCHED_HEAD = 64  # the largest for which what comes next is fetched
PITCH = 4 * SPAN
ROW_ADDRESSES, SCORES, OUTPUTS, STATE = 8 * ROWS, PITCH * ROWS, 4 * MAX_HEAD * ROWS, 4 * ROWS
FIELDS = 5  # of a group: row of the page table, step's row of its chunk's first token, position of that,
# first query row of the chunk, and how many
LOWEST = np.float32(-np.inf)  # score of what a token does not see
FLOOR = np.float32(-1e30)  # below every score: the maximum of none
ONE = np.float32(1.0)
ZERO = np.float32(0.0)


@kernel("int64(int64, int64, int64, int64)")
def _cut(chunks, C, G, groups):
    """groups [M, FIELDS] of chunks [C, 3] (row of the page table, first position, length). Returns M."""
    found, token = 0, 0
    for c in range(C):
        row, start, length = (
            get_i64(chunks + c * 24),
            get_i64(chunks + c * 24 + 8),
            get_i64(chunks + c * 24 + 16),
        )
        for i in range(0, length * G, ROWS):
            at = groups + found * FIELDS * 8
            put_i64(at, row)
            put_i64(at + 8, token)
            put_i64(at + 16, start)
            put_i64(at + 24, i)
            put_i64(at + 32, min(ROWS, length * G - i))
            found += 1
        token += length
    return found


@inline
def _block(table, row, P, block, page_blocks):
    """Which block of the cache is the `block`th of a row of the page table."""
    page = get_i64(table + (row * P + block // page_blocks) * 8)
    return page * page_blocks + block % page_blocks


@inline
def _fetch(at, size):
    for line in range(at, at + size, 64):
        fetch(line)


@kernel("void(" + "int64, " * 14 + "int64)")
def _store(first, last, k, k_pitch, v, v_pitch, chunks, C, table, P, page_blocks, cache, head, Hkv, D):
    """Keys and values of tokens [first, last) of the chunks to their places in the cache; head: bytes of a
    head's."""
    begins = 0
    for c in range(C):
        row, start = get_i64(chunks + c * 24), get_i64(chunks + c * 24 + 8)
        ends = begins + get_i64(chunks + c * 24 + 16)
        for n in range(max(first, begins), min(last, ends)):
            position = start + n - begins
            block = _block(table, row, P, position // BLOCK, page_blocks)
            lane = position % BLOCK
            for h in range(Hkv):
                to = cache + h * head + block * (2 * BLOCK * 4) * D
                key, value = k + n * k_pitch + h * D * 4, v + n * v_pitch + h * D * 4
                for d in range(D):
                    put_f32(to + d * 64 + lane * 4, get_f32(key + d * 4))
                for d in range(0, D, 16):
                    store(to + D * 64 + d * 64 + lane * 64, load(value + d * 4))
        begins = ends


@inline
def _score(
    count, rows, keys, table, row, P, page_blocks, first_block, from_block, blocks, D, fetches, scores
):  # fmt: skip
    """Scores of `count` rows, PITCH apart, by the blocks [from_block, blocks) of a span, which begins with
    first_block of a context. Blocks that follow each other in the cache, too, are multiplied at once.
    fetches: of values."""
    b = from_block
    while b < blocks:
        block = _block(table, row, P, first_block + b, page_blocks)
        run = 1
        while b + run < blocks:
            if _block(table, row, P, first_block + b + run, page_blocks) != block + run:
                break
            run += 1
        at = keys + block * 128 * D
        if fetches:
            for values in range(at + 64 * D, at + run * 128 * D, 128 * D):
                _fetch(values, 64 * D)
        products_f32(count, rows, at, 128 * D, run, D, scores + b * 64, PITCH)
        b += run


@inline
def _weigh(line, from_block, blocks, held, below, scale, best, whole, sums, D):
    """Scores of a row become weights: of tokens [below, held), others get 0. Its maximum, sum and sums of
    values move on."""
    top = splat(get_f32(best))
    for b in range(from_block, blocks):
        s = first_lanes(load(line + b * 64) * splat(scale), held - b * BLOCK, LOWEST)
        if below > b * BLOCK:
            s = first_lanes(splat(LOWEST), below - b * BLOCK, s)
        store(line + b * 64, s)
        top = larger(top, s)
    most = largest(top)
    before = get_f32(best)
    shrink = ONE if most == before else np.float32(math.exp(before - most))
    part = zeros()
    for b in range(from_block, blocks):
        e = exp(load(line + b * 64) - splat(most))
        store(line + b * 64, e)
        part = part + e
    put_f32(best, most)
    put_f32(whole, get_f32(whole) * shrink + total(part))
    for at in range(sums, sums + D * 4, 64):
        store(at, load(at) * splat(shrink))


@kernel("void(" + "int64, " * 16 + "float32)")
def _attend(
    counter, q, q_pitch, groups, M, table, P, page_blocks, cache, head, Hq, Hkv, D, window, sinks, out, scale
):
    """out [N, Hq, D] of q, whose tokens lie q_pitch bytes apart.

    window: of how many tokens each sees, itself included; 0: all. sinks: float32 [Hq], or 0.
    """
    G = Hq // Hkv
    rows, weights = stack(ROW_ADDRESSES), stack(ROW_ADDRESSES)
    scores, sums, best, whole = stack(SCORES), stack(OUTPUTS), stack(STATE), stack(STATE)
    for r in range(ROWS):
        put_i64(weights + 8 * r, scores + r * PITCH)
    while True:
        job = take(counter)
        if job >= M * Hkv:
            return
        group, h = groups + job // Hkv * (FIELDS * 8), job % Hkv
        row, token, start = get_i64(group), get_i64(group + 8), get_i64(group + 16)
        first, count, next_job = get_i64(group + 24), get_i64(group + 32), min(job + 1, M * Hkv - 1)
        fetches = first == 0 and D <= FETCHED_HEAD  # a chunk's other groups find the context in a cache
        next_row = get_i64(groups + next_job // Hkv * (FIELDS * 8))
        next_head = cache + next_job % Hkv * head
        for r in range(count):
            n, g = token + (first + r) // G, (first + r) % G
            put_i64(rows + 8 * r, q + n * q_pitch + (h * G + g) * D * 4)
            put_f32(best + 4 * r, get_f32(sinks + (h * G + g) * 4) if sinks else FLOOR)
            put_f32(whole + 4 * r, ONE if sinks else ZERO)
            for d in range(0, D * 4, 64):
                store(sums + r * D * 4 + d, zeros())
        end = start + (first + count - 1) // G + 1  # of the longest context
        low = max(0, start + first // G + 1 - window) if window else 0  # of what any row sees
        for begin in range(low // SPAN * SPAN, end, SPAN):
            length = min(end - begin, SPAN)
            blocks = (length + BLOCK - 1) // BLOCK
            from_block = max(0, low - begin) // BLOCK
            _score(
                count, rows, cache + h * head, table, row, P, page_blocks, begin // BLOCK, from_block, blocks,
                D, fetches, scores,
            )  # fmt: skip
            for r in range(count):
                held = start + (first + r) // G + 1 - begin  # of these tokens, by this row
                below = held - window if window else 0
                _weigh(
                    scores + r * PITCH, from_block, blocks, held, below, scale, best + 4 * r, whole + 4 * r,
                    sums + r * D * 4, D,
                )  # fmt: skip
            for b in range(from_block, blocks):
                at = cache + h * head + _block(table, row, P, begin // BLOCK + b, page_blocks) * 128 * D
                if fetches:
                    block = _block(table, next_row, P, begin // BLOCK + b, page_blocks)
                    _fetch(next_head + block * 128 * D, 64 * D)
                for r in range(count):
                    put_i64(weights + 8 * r, scores + r * PITCH + b * 64)
                used = min(length - b * BLOCK, BLOCK)
                products_onto(count, weights, at + D * 64, BLOCK * 64, D // 16, used, sums, D * 4)
        for r in range(count):
            n, g = token + (first + r) // G, (first + r) % G
            share = splat(ONE / get_f32(whole + 4 * r))
            for d in range(0, D * 4, 64):
                store(out + ((n * Hq + h * G + g) * D) * 4 + d, load(sums + r * D * 4 + d) * share)


@phased(15, 1)
def _shared_attend(phases, threads, given):
    """`_attend`, by threads."""
    (
        q, q_pitch, groups, M, table, P, page_blocks, cache, head, Hq, Hkv, D, window, sinks, out,
    ) = integers(given, 15)  # fmt: skip
    (scale,) = floats(given + 15 * 8, 1)
    begin_phase(phases)
    _attend(
        phases, q, q_pitch, groups, M, table, P, page_blocks, cache, head, Hq, Hkv, D, window, sinks, out,
        scale,
    )  # fmt: skip
    end_phase(phases)


class Chunks:
    """The chunks of a step, in the order of its tokens, as kernels see them."""

    def __init__(self, chunks: Sequence[tuple[int, int, int]], group_size: int, window: int = 0) -> None:
        """chunks: (row of the page table, first position, length) of each. group_size: G. window: how many
        tokens each sees, itself included; 0: all of its context."""
        self._chunks_C3 = torch.tensor(chunks, dtype=torch.int64)
        # Of a token and a position that it sees, or more.
        self.pairs = sum(
            min(start + length, length + window if window else start + length) * length
            for _, start, length in chunks
        )
        most = sum(-(-length * group_size // ROWS) for _, _, length in chunks)
        self._groups_MF = torch.empty(most, FIELDS, dtype=torch.int64)
        addresses = self._chunks_C3.data_ptr(), self._groups_MF.data_ptr()
        _cut(addresses[0], len(chunks), group_size, addresses[1])
        self.bound = addresses[0], len(chunks), addresses[1], most


class Cache:
    """The pages of one layer as kernels see them."""

    def __init__(
        self, cache_HX: Tensor, table_RP: Tensor, page_size: int, *, window: int, scale: float
    ) -> None:
        """cache: float32 [Hkv, slots * 2 * D]; table: int64 [R, P]; page_size: tokens, a multiple of BLOCK.
        window: as of `Chunks`. scale: of scores."""
        self._keeps = cache_HX, table_RP
        self.window, self.scale = window, scale
        # Page table, its width, blocks of a page, the pages and bytes of a head of them.
        self.pages = (
            table_RP.data_ptr(), table_RP.shape[1], page_size // BLOCK, cache_HX.data_ptr(),
            cache_HX.stride(0) * 4,
        )  # fmt: skip


def attend(
    q_NHD: Tensor,
    k_NHD: Tensor,
    v_NHD: Tensor,
    chunks: Chunks,
    cache: Cache,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Stores k and v [N, Hkv, D], then attends with q: float32 [N, Hq, D].

    A token's heads lie side by side in q, k and v. cache: this layer's. sinks: float32 [Hq], contiguous.
    """
    (N, Hq, D), Hkv = q_NHD.shape, k_NHD.shape[1]
    chunks_C3, C, groups_MF, M = chunks.bound
    out_NHD = torch.empty(N, Hq, D)
    _store(
        0, N, k_NHD.data_ptr(), k_NHD.stride(0) * 4, v_NHD.data_ptr(), v_NHD.stride(0) * 4,
        chunks_C3, C, *cache.pages, Hkv, D,
    )  # fmt: skip
    _shared_attend(
        threads_for(2 * chunks.pairs * Hq * D), None, q_NHD.data_ptr(), q_NHD.stride(0) * 4,
        groups_MF, M, *cache.pages, Hq, Hkv, D,
        cache.window, 0 if sinks_H is None else sinks_H.data_ptr(), out_NHD.data_ptr(), cache.scale,
    )  # fmt: skip
    return out_NHD
