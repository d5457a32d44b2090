"""Causal attention of prompts with heads of 128 values, by warps that divide the work (Gluon, Hopper).

As prefill.py, by the same kind of tiles: QUERIES rows, the tokens of one chunk times the heads that share a
key. Four warps copy queries, and keys and values from their pages (cp.async, so pages of any size do); two
groups of four have half of the rows each, and go through BLOCK keys at a time. While a group adds up the
values of some keys, the scores of the next ones are computed first and then their softmax. A program stays on
its multiprocessor and takes tile after tile, longest first: the next one's queries and keys arrive while the
last one's results are written. docs/notes/attention.md has times.

Legend: as prefill.py, with D = 128; W places of work, each a tile and a KV head.
"""

from __future__ import annotations

import math

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from turnout.kernels.attention.specialised_spans import copy_columns
from turnout.kernels.hopper.schedule import advance, stage_barriers

QUERIES = 128  # rows of a tile
BLOCK = 128  # tokens of a context at a time
STAGES = 2  # blocks of keys and values that are kept


@gluon.jit
def place_of(turn, total):
    """Which of the W places of work is a program's turn: forwards and backwards, so that all have about as
    much of what takes long and what does not; `total` or more: none."""
    programs = gl.num_programs(0)
    within = gl.where(turn % 2 == 1, programs - 1 - gl.program_id(0), gl.program_id(0))
    return turn * programs + within


@gluon.jit
def work_at(tiles_ptr, place, Hkv):
    """First row, tokens, start in its context, chunk, and KV head of a place of work."""
    tile = tiles_ptr + place // Hkv * 4
    count, start = gl.load(tile + 1).to(gl.int32), gl.load(tile + 2).to(gl.int32)
    return gl.load(tile), count, start, gl.load(tile + 3), place % Hkv


@gluon.jit
def load_work(
    q_ptr, cache_ptr, tiles_ptr, table_ptr, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, total,
    head_stride, P, Hkv, G: gl.constexpr, GP: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Queries, then block after block of keys and values, as their places become empty. Four warps."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, gl.SliceLayout(1, COPY))
    key = gl.arange(0, BLOCK, gl.SliceLayout(1, COPY))
    stage = 0
    phase = 1
    turn = 0
    work = place_of(0, total)
    while work < total:
        first, count, start, owner, h = work_at(tiles_ptr, work, Hkv)
        end = start + count
        pages = table_ptr + owner * P
        base = cache_ptr + h.to(gl.int64) * head_stride
        place = key
        page = gl.load(pages + place // PAGE, mask=place < end, other=0)
        mbarrier.wait(q_empty.index(0), (turn & 1) ^ 1)
        for half in gl.static_range(2):
            token, g = (half * 64 + i) // GP, (half * 64 + i) % GP
            rows = q_ptr + ((first + token) * (Hkv * G) + h * G + g) * 128
            copy_columns(q.index(half), rows, (token < count) & (g < G), 0, 128, COPY)
        async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)
        for _ in range(0, (end + BLOCK - 1) // BLOCK):
            slots = base + (page.to(gl.int64) * PAGE + place % PAGE) * 256
            known = place < end
            place += BLOCK
            page = gl.load(pages + place // PAGE, mask=place < end, other=0)
            mbarrier.wait(k_empty.index(stage), phase)
            copy_columns(k.index(stage), slots, known, 0, 128, COPY)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase)
            copy_columns(v.index(stage), slots, known, 128, 128, COPY)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            stage, phase = advance(stage, phase, STAGES)
        turn += 1
        work = place_of(turn, total)


@gluon.jit
def _begin_scores(q, k, SCORES: gl.constexpr, BLOCK: gl.constexpr):
    scores = gl.zeros([64, BLOCK], gl.float32, SCORES)
    return warpgroup_mma(q, k.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _weigh(scores, best, total, scale, first, last_M, whole, OPERAND: gl.constexpr, BLOCK: gl.constexpr):
    """The softmax's maximum and sum (base 2) with a block's scores, by what earlier sums shrink, and weights.
    first: the block's first place; last_M: each row's own; whole: how many places all rows see."""
    if first + BLOCK > whole:
        place = first + gl.arange(0, BLOCK, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(place[None, :] <= last_M[:, None], scores, float("-inf"))
    higher = gl.maximum(best, gl.max(scores, 1) * scale)
    change = gl.exp2(best - higher)
    p = gl.exp2(scores * scale - higher[:, None])
    weights = gl.convert_layout(p.to(gl.bfloat16), OPERAND, assert_trivial=True)
    return higher, total * change + gl.sum(p, 1), change, weights


@gluon.jit
def _release(empty):
    gl.thread_barrier()
    mbarrier.arrive(empty, count=1)


@gluon.jit
def _store(acc, staged, out_ptr, first, count, h, Hkv, HALF: gl.constexpr, G: gl.constexpr, GP: gl.constexpr):
    """Half of a tile's results, by way of the shared memory `staged`, where they lie as rows."""
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    staged.store(acc.to(gl.bfloat16))
    gl.thread_barrier()
    row = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
    token, g = row // GP, row % GP
    at = ((first + token) * (Hkv * G) + h * G + g)[:, None] * 128
    at += gl.arange(0, 128, gl.SliceLayout(0, STORE))[None, :]
    gl.store(out_ptr + at, staged.load(STORE), mask=((token < count) & (g < G))[:, None])


@gluon.jit
def attend_work(
    out_ptr, tiles_ptr, q, k, v, staged, q_full, q_empty, k_full, k_empty, v_full, v_empty, total, Hkv, scale,
    HALF: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Half of the rows of tile after tile. Four warps."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    mine = q.index(HALF)
    stage = 0
    phase = 0
    turn = 0
    work = place_of(0, total)
    while work < total:
        first, count, start, _, h = work_at(tiles_ptr, work, Hkv)
        blocks = (start + count + BLOCK - 1) // BLOCK
        row = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        last = start + row // GP
        best = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        sums = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, 128], gl.float32, SUMS)
        mbarrier.wait(q_full.index(0), turn & 1)
        mbarrier.wait(k_full.index(stage), phase)
        fence_async_shared()
        scores = warpgroup_mma_wait(0, deps=[_begin_scores(mine, k.index(stage), SCORES, BLOCK)])
        _release(k_empty.index(stage))
        best, sums, _, weights = _weigh(scores, best, sums, scale, 0, last, start + 1, OPERAND, BLOCK)
        for block in range(1, blocks):
            after, after_phase = advance(stage, phase, STAGES)
            mbarrier.wait(k_full.index(after), after_phase)
            fence_async_shared()
            later = _begin_scores(mine, k.index(after), SCORES, BLOCK)
            mbarrier.wait(v_full.index(stage), phase)
            fence_async_shared()
            adding = warpgroup_mma(weights, v.index(stage), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[later])
            _release(k_empty.index(after))
            best, sums, change, weights = _weigh(
                scores, best, sums, scale, block * BLOCK, last, start + 1, OPERAND, BLOCK
            )
            acc = warpgroup_mma_wait(0, deps=[adding])
            _release(v_empty.index(stage))
            acc *= gl.convert_layout(change, gl.SliceLayout(1, SUMS))[:, None]
            stage, phase = after, after_phase
        mbarrier.arrive(q_empty.index(0), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        fence_async_shared()
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, v.index(stage), acc, is_async=True)])
        _release(v_empty.index(stage))
        stage, phase = advance(stage, phase, STAGES)
        acc *= gl.convert_layout(1.0 / sums, gl.SliceLayout(1, SUMS))[:, None]
        _store(acc, staged, out_ptr, first, count, h, Hkv, HALF, G, GP)
        turn += 1
        work = place_of(turn, total)


@gluon.jit(do_not_specialize=["P", "total"])
def attend_tiles_specialised(
    q_ptr, cache_ptr, tiles_ptr, table_ptr, out_ptr, scale, head_stride, P, Hkv, total,
    G: gl.constexpr, GP: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `prefill.attend_tiles`, in bfloat16, with no window and no sinks. total: W; the grid may be smaller,
    of as many programs as the GPU has multiprocessors."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], TILE)
    staged = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], TILE)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], TILE)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, 128], TILE)
    q_full, q_empty = stage_barriers(1, 128, 2)
    k_full, k_empty = stage_barriers(STAGES, 128, 2)
    v_full, v_empty = stage_barriers(STAGES, 128, 2)
    gl.warp_specialize(
        [
            (attend_work, (
                out_ptr, tiles_ptr, q, k, v, staged.index(0), q_full, q_empty, k_full, k_empty, v_full,
                v_empty, total, Hkv, scale, 0, G, GP, BLOCK, STAGES,
            )),
            (attend_work, (
                out_ptr, tiles_ptr, q, k, v, staged.index(1), q_full, q_empty, k_full, k_empty, v_full,
                v_empty, total, Hkv, scale, 1, G, GP, BLOCK, STAGES,
            )),
            (load_work, (
                q_ptr, cache_ptr, tiles_ptr, table_ptr, q, k, v, q_full, q_empty, k_full, k_empty, v_full,
                v_empty, total, head_stride, P, Hkv, G, GP, PAGE, BLOCK, STAGES,
            )),
        ],
        [4, 4], [216, 72],
    )  # fmt: skip


def attend(
    q_NHD: Tensor,
    cache_HS2D: Tensor,
    tiles_TF: Tensor,
    table_BP: Tensor,
    out_NHD: Tensor,
    *,
    page_size: int,
    scale: float,
    processors: int,
) -> None:
    """As `prefill.attend`, in bfloat16, of tiles of QUERIES rows, whose tokens share keys between at most as
    many heads. processors: of the GPU."""
    Hkv = len(cache_HS2D)
    G, total = q_NHD.shape[1] // Hkv, len(tiles_TF) * Hkv
    if total:
        attend_tiles_specialised[(min(total, processors),)](
            q_NHD, cache_HS2D, tiles_TF, table_BP, out_NHD,
            scale * math.log2(math.e), cache_HS2D.stride(0), table_BP.shape[1], Hkv, total,
            G, triton.next_power_of_2(G), page_size, BLOCK, STAGES, num_warps=4,
        )  # fmt: skip
