"""The spans of latent.py, 64 heads at a time, in bfloat16, by warps that divide the work (Gluon, Hopper).

With many heads the products are the bound: each latent vector takes part in H (2 LC + DR) of them. A program
has 64 heads and goes through a span in tiles of 64 tokens. Four warps load the next tile while two groups of
four multiply: one computes scores and weights of a tile, and adds the weighted left half of its vectors; the
other adds the right half, so that the 64 x 512 sums have room in registers. Tiles are gathered token by token
(cp.async), so pages of any size do, single tokens that a sparse layer chose too.

A tile has three parts, its left half, its right half and the rotated keys, and there is room for two tiles.
Each part is loaded again as soon as whoever read it last is done: the rotated keys after the scores, the
halves after their sums. One barrier for all parts makes it slower, and so does fetching tiles to the L2 cache
ahead of time. docs/notes/serving.md has times on an H200.

Legend: as latent.py, with LC = 512 and DR = 64.
"""

from __future__ import annotations

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.hopper.schedule import advance

STAGES = 2  # there is no room for three


@gluon.jit
def copy_columns(to, rows, mask, FIRST: gl.constexpr, WIDTH: gl.constexpr, COPY: gl.constexpr):
    """Begin to copy [64, WIDTH] from `rows` to shared memory, zeros where `mask` is false."""
    at = rows[:, None] + FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))[None, :]
    async_copy.async_copy_global_to_shared(to, at, mask=mask[:, None])


@gluon.jit
def load_tiles(
    q_ptr, cache_ptr, table_at, q, kept, q_full, full, empty, first_row, heads, start, stop, tiles,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The queries, then tile after tile, each of its three parts as its place becomes empty. Four warps."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, gl.SliceLayout(1, COPY))
    rows = q_ptr + (first_row + i).to(gl.int64) * 576
    copy_columns(q[0], rows, i < heads, 0, 256, COPY)
    copy_columns(q[1], rows, i < heads, 256, 256, COPY)
    copy_columns(q[2], rows, i < heads, 512, 64, COPY)
    async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)
    place = start + i
    page = gl.load(table_at + place // PAGE, mask=place < stop, other=0)
    stage = 0
    phase = 1
    for _ in range(0, tiles):
        rows = cache_ptr + (page.to(gl.int64) * PAGE + place % PAGE) * 576
        known = place < stop
        place += 64
        page = gl.load(table_at + place // PAGE, mask=place < stop, other=0)
        mbarrier.wait(empty[2].index(stage), phase)
        copy_columns(kept[2].index(stage), rows, known, 512, 64, COPY)
        mbarrier.wait(empty[1].index(stage), phase)
        copy_columns(kept[1].index(stage), rows, known, 256, 256, COPY)
        mbarrier.wait(empty[0].index(stage), phase)
        copy_columns(kept[0].index(stage), rows, known, 0, 256, COPY)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def begin_scores(q, kept, stage):
    """q [64, 576] @ tile [64, 576].T begins: three products to wait for."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    scores = gl.zeros([64, 64], gl.float32, SCORES)
    scores = warpgroup_mma(q[0], kept[0].index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(q[1], kept[1].index(stage).permute((1, 0)), scores, is_async=True)
    return warpgroup_mma(q[2], kept[2].index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def store_half(acc, half, to_ptr, rows, held, COLUMN: gl.constexpr):
    """acc [64, 256] to columns of `rows` [64] of 512 values, where `held`, by way of the shared memory
    `half`."""
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    half.store(acc.to(gl.bfloat16))
    gl.thread_barrier()
    columns = COLUMN + gl.arange(0, 256, gl.SliceLayout(0, STORE))
    rows = gl.convert_layout(rows, gl.SliceLayout(1, STORE))
    held = gl.convert_layout(held, gl.SliceLayout(1, STORE))
    at = to_ptr + rows.to(gl.int64)[:, None] * 512 + columns[None, :]
    gl.store(at, half.load(STORE), mask=held[:, None])


@gluon.jit
def weigh_and_add(
    q, kept, weights, shrink, q_full, full, empty, sent, taken, partial_ptr, lse_ptr, first_row, heads, split,
    splits, start, stop, tiles, scale, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores, their softmax, and the sums of the left half. Four warps."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    best = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, 256], gl.float32, SUMS)
    place = start + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    stage = 0
    phase = 0
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(full.index(0), 0)
    fence_async_shared()
    scores = warpgroup_mma_wait(0, deps=[begin_scores(q, kept, 0)])
    for turn in range(0, tiles):
        gl.thread_barrier()
        mbarrier.arrive(empty[2].index(stage), count=1)
        scores = gl.where((place < stop)[None, :], scores * scale, float("-inf"))
        higher = gl.maximum(best, gl.max(scores, 1))
        least = gl.where(higher > float("-inf"), higher, 0.0)  # of an empty span
        change = gl.exp2(best - least)
        p = gl.exp2(scores - least[:, None])
        total = total * change + gl.sum(p, 1)
        best = higher
        place += 64
        mbarrier.wait(taken.index(0), (turn & 1) ^ 1)
        weights.store(p.to(gl.bfloat16))
        shrink.store(change)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(sent.index(0), count=1)
        acc *= gl.convert_layout(change, gl.SliceLayout(1, SUMS))[:, None]
        sums = warpgroup_mma(weights, kept[0].index(stage), acc, is_async=True)
        after, after_phase = advance(stage, phase, STAGES)
        if turn + 1 < tiles:
            mbarrier.wait(full.index(after), after_phase)
            fence_async_shared()
            later = begin_scores(q, kept, after)
            acc = warpgroup_mma_wait(3, deps=[sums])
            gl.thread_barrier()
            mbarrier.arrive(empty[0].index(stage), count=1)
            scores = warpgroup_mma_wait(0, deps=[later])
        else:
            acc = warpgroup_mma_wait(0, deps=[sums])
        stage = after
        phase = after_phase
    whole = gl.where(total > 0, total, 1.0)
    mbarrier.wait(taken.index(0), (tiles & 1) ^ 1)
    shrink.store(1.0 / whole)
    gl.thread_barrier()
    mbarrier.arrive(sent.index(0), count=1)
    head = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    rows = (first_row + head) * splits + split
    gl.store(lse_ptr + rows, gl.where(total > 0, best + gl.log2(whole), float("-inf")), mask=head < heads)
    acc *= gl.convert_layout(1.0 / whole, gl.SliceLayout(1, SUMS))[:, None]
    store_half(acc, kept[0].index(0), partial_ptr, rows, head < heads, 0)


@gluon.jit
def add(
    kept, weights, shrink, full, empty, sent, taken, partial_ptr, first_row, heads, split, splits, tiles,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The sums of the right half. Four warps."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    acc = gl.zeros([64, 256], gl.float32, SUMS)
    stage = 0
    phase = 0
    for turn in range(0, tiles):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.wait(sent.index(0), turn & 1)
        acc *= shrink.load(gl.SliceLayout(1, SUMS))[:, None]
        fence_async_shared()
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, kept[1].index(stage), acc, is_async=True)])
        gl.thread_barrier()
        mbarrier.arrive(taken.index(0), count=1)
        mbarrier.arrive(empty[1].index(stage), count=1)
        stage, phase = advance(stage, phase, STAGES)
    mbarrier.wait(sent.index(0), tiles & 1)
    acc *= shrink.load(gl.SliceLayout(1, SUMS))[:, None]
    head = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    store_half(acc, kept[1].index(0), partial_ptr, (first_row + head) * splits + split, head < heads, 256)


@gluon.jit(do_not_specialize=["P", "splits"])
def attend_latent_span_specialised(
    q_ptr, cache_ptr, table_ptr, ends_ptr, partial_ptr, lse_ptr, scale, P, H, splits,
    PAGE: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `attend_latent_span`: partial bfloat16 [B, H, N, 512] and lse float32 [B, H, N] (base 2).

    The grid is B times as many programs as H has 64 heads, or less for the last, heads first, which read the
    same tiles, by N.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    parts = (H + 63) // 64
    b = gl.program_id(0) // parts
    first = gl.program_id(0) % parts * 64
    first_row, heads = b * H + first, H - first
    split = gl.program_id(1)
    end = gl.load(ends_ptr + b).to(gl.int32)
    span = (end + splits * 64 - 1) // (splits * 64) * 64
    start = split * span
    stop = gl.minimum(start + span, end)
    tiles = gl.maximum((stop - start + 63) // 64, 1)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = (
        gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE),
    )
    kept = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE),
    )
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    shrink = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    sent = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = (
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(q_full.index(0), count=128)
    mbarrier.init(sent.index(0), count=1)
    mbarrier.init(taken.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        for part in gl.static_range(3):
            mbarrier.init(empty[part].index(i), count=1)
    gl.warp_specialize(
        [
            (weigh_and_add, (
                q, kept, weights, shrink, q_full, full, empty, sent, taken, partial_ptr, lse_ptr, first_row,
                heads, split, splits, start, stop, tiles, scale, STAGES,
            )),
            (add, (
                kept, weights, shrink, full, empty, sent, taken, partial_ptr, first_row, heads, split, splits,
                tiles, STAGES,
            )),
            (load_tiles, (
                q_ptr, cache_ptr, table_ptr + b.to(gl.int64) * P, q, kept, q_full, full, empty, first_row,
                heads, start, stop, tiles, PAGE, STAGES,
            )),
        ],
        [4, 4], [184, 80],
    )  # fmt: skip


def attend_spans(
    q: Tensor, cache: Tensor, table: Tensor, ends: Tensor, partial: Tensor, lse: Tensor, scale: float,
    page_size: int,
) -> None:  # fmt: skip
    """Launch `attend_latent_span_specialised`, which says what the tensors are."""
    B, H, splits = lse.shape
    attend_latent_span_specialised[(B * -(-H // 64), splits)](
        q, cache, table, ends, partial, lse, scale, table.shape[1], H, splits, page_size, STAGES, True,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
