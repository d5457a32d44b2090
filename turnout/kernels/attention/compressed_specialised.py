"""The spans of compressed.py, 64 heads at a time, in bfloat16, by warps that divide the work (Gluon, Hopper).

As latent_specialised.py: four warps load, four weigh and add the left halves of keys, four add the right
ones. Keys are of 512 values, and values too. The kernel of compressed.py has 16 heads in a program, so that
64 heads read every key from the L2 cache four times; here they read it once. A single span ends here, with
the sinks' share, and leaves nothing to join.

Legend: as compressed.py.
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

from turnout.kernels.attention.latent_specialised import STAGES, add, copy_columns, store_half
from turnout.kernels.hopper.schedule import advance


@gluon.jit
def recent_places(i, end, SEEN, FIRST, RING: gl.constexpr, RECENT: gl.constexpr):
    """Where in `recent` the i-th recent token of a row is, and whether it is seen; see
    `attend_compressed_span`."""
    if RING:
        age = (end - 1 - i + 2 * RECENT) % RECENT
        return i, (i < RECENT) & (age < SEEN) & (age < end)
    else:
        return end - SEEN + i - FIRST, (i < SEEN) & (end - SEEN + i >= 0)


@gluon.jit
def load_keys(
    q_ptr, recent_ptr, cache_ptr, table_at, q, kept, q_full, full, empty, first_row, heads, start, stop,
    tiles, end, Y, SEEN, FIRST,
    RING: gl.constexpr, RECENT: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The queries, then tile after tile, each of its halves as its place becomes empty. Four warps."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, gl.SliceLayout(1, COPY))
    rows = q_ptr + (first_row + i).to(gl.int64) * 512
    copy_columns(q[0], rows, i < heads, 0, 256, COPY)
    copy_columns(q[1], rows, i < heads, 256, 256, COPY)
    async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)
    place = start + i
    entry = place - WIDTH
    page = gl.load(table_at + entry // PAGE, mask=(entry >= 0) & (place < stop), other=0)
    stage = 0
    phase = 1
    for turn in range(0, tiles):
        known = place < stop
        if start + turn * 64 < WIDTH:
            at, seen = recent_places(place, end, SEEN, FIRST, RING, RECENT)
            known = known & seen
            rows = recent_ptr + gl.where(known, at, 0).to(gl.int64) * 512
        else:
            rows = cache_ptr + (page.to(gl.int64) * PAGE + (place - WIDTH) % PAGE) * Y
        place += 64
        entry = place - WIDTH
        page = gl.load(table_at + entry // PAGE, mask=(entry >= 0) & (place < stop), other=0)
        mbarrier.wait(empty[1].index(stage), phase)
        copy_columns(kept[1].index(stage), rows, known, 256, 256, COPY)
        mbarrier.wait(empty[0].index(stage), phase)
        copy_columns(kept[0].index(stage), rows, known, 0, 256, COPY)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def begin_scores(q, kept, stage):
    """q [64, 512] @ tile [64, 512].T begins: two products to wait for."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    scores = gl.zeros([64, 64], gl.float32, SCORES)
    scores = warpgroup_mma(q[0], kept[0].index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    return warpgroup_mma(q[1], kept[1].index(stage).permute((1, 0)), scores, is_async=True)


@gluon.jit
def weigh_and_add(
    q, kept, weights, shrink, q_full, full, empty, sent, taken, sinks_ptr, partial_ptr, lse_ptr, first_row,
    first, heads, split, splits, start, stop, tiles, scale, end, SEEN, FIRST,
    RING: gl.constexpr, RECENT: gl.constexpr, WIDTH: gl.constexpr, WHOLE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores, their softmax, and the sums of the left half. Four warps."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    best = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, 256], gl.float32, SUMS)
    stage = 0
    phase = 0
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(full.index(0), 0)
    fence_async_shared()
    scores = warpgroup_mma_wait(0, deps=[begin_scores(q, kept, 0)])
    for turn in range(0, tiles):
        place = start + turn * 64 + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        _, seen = recent_places(place, end, SEEN, FIRST, RING, RECENT)
        known = (place < stop) & (seen | (place >= WIDTH))
        scores = gl.where(known[None, :], scores * scale, float("-inf"))
        higher = gl.maximum(best, gl.max(scores, 1))
        least = gl.where(higher > float("-inf"), higher, 0.0)  # of an empty span
        change = gl.exp2(best - least)
        p = gl.exp2(scores - least[:, None])
        total = total * change + gl.sum(p, 1)
        best = higher
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
            acc = warpgroup_mma_wait(2, deps=[sums])
            gl.thread_barrier()
            mbarrier.arrive(empty[0].index(stage), count=1)
            scores = warpgroup_mma_wait(0, deps=[later])
        else:
            acc = warpgroup_mma_wait(0, deps=[sums])
        stage = after
        phase = after_phase
    head = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    if WHOLE:
        sink = gl.load(sinks_ptr + first + head, mask=head < heads, other=0.0) * 1.4426950408889634  # log2(e)
        higher = gl.maximum(best, sink)
        change = gl.exp2(best - higher)
        last = change / (total * change + gl.exp2(sink - higher))
    else:
        last = 1.0 / gl.where(total > 0, total, 1.0)
        lse = gl.where(total > 0, best + gl.log2(gl.where(total > 0, total, 1.0)), float("-inf"))
        gl.store(lse_ptr + (first_row + head) * splits + split, lse, mask=head < heads)
    mbarrier.wait(taken.index(0), (tiles & 1) ^ 1)
    shrink.store(last)
    gl.thread_barrier()
    mbarrier.arrive(sent.index(0), count=1)
    acc *= gl.convert_layout(last, gl.SliceLayout(1, SUMS))[:, None]
    store_half(acc, kept[0].index(0), partial_ptr, (first_row + head) * splits + split, head < heads, 0)


@gluon.jit(do_not_specialize=["splits", "FIRST", "SEEN"])
def attend_compressed_span_specialised(
    q_ptr, recent_ptr, ends_ptr, states_ptr, cache_ptr, table_ptr, counts_ptr, sinks_ptr, partial_ptr,
    lse_ptr, scale, table_stride, H, splits, Y, SEEN, FIRST,
    RING: gl.constexpr, RECENT: gl.constexpr, PAGE: gl.constexpr, WHOLE: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """As `attend_compressed_span` with D = 512: partial bfloat16 [N, H, splits, 512] and lse float32 [N, H,
    splits] (base 2). WHOLE: of a single span, which sinks [H] have a share of; lse is not stored.

    The grid is N times as many programs as H has 64 heads, or less for the last, by splits.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    groups = (H + 63) // 64
    n = gl.program_id(0) // groups
    first = gl.program_id(0) % groups * 64
    first_row, heads = n * H + first, H - first
    split = gl.program_id(1)
    end = gl.load(ends_ptr + n).to(gl.int32)
    count = gl.load(counts_ptr + n).to(gl.int32)
    WIDTH: gl.constexpr = (RECENT + 63) // 64 * 64
    span = (WIDTH + count + splits * 64 - 1) // (splits * 64) * 64
    start = split * span
    stop = gl.minimum(start + span, WIDTH + count)
    tiles = gl.maximum((stop - start + 63) // 64, 1)
    if RING:
        recent_ptr += gl.load(states_ptr + n).to(gl.int64) * RECENT * 512
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q = (
        gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE),
    )
    kept = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], TILE),
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
    )
    mbarrier.init(q_full.index(0), count=128)
    mbarrier.init(sent.index(0), count=1)
    mbarrier.init(taken.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        for part in gl.static_range(2):
            mbarrier.init(empty[part].index(i), count=1)
    gl.warp_specialize(
        [
            (weigh_and_add, (
                q, kept, weights, shrink, q_full, full, empty, sent, taken, sinks_ptr, partial_ptr, lse_ptr,
                first_row, first, heads, split, splits, start, stop, tiles, scale, end, SEEN, FIRST,
                RING, RECENT, WIDTH, WHOLE, STAGES,
            )),
            (add, (
                kept, weights, shrink, full, empty, sent, taken, partial_ptr, first_row, heads, split, splits,
                tiles, STAGES,
            )),
            (load_keys, (
                q_ptr, recent_ptr, cache_ptr, table_ptr + n.to(gl.int64) * table_stride, q, kept, q_full,
                full, empty, first_row, heads, start, stop, tiles, end, Y, SEEN, FIRST,
                RING, RECENT, WIDTH, PAGE, STAGES,
            )),
        ],
        [4, 4], [184, 80],
    )  # fmt: skip


def attend_spans(
    q: Tensor, recent: Tensor, ends: Tensor, states: Tensor | None, cache: Tensor, table: Tensor,
    counts: Tensor, sinks: Tensor, partial: Tensor, lse: Tensor, *, scale: float, table_stride: int,
    seen: int, first: int, page: int,
) -> None:  # fmt: skip
    """Launch `attend_compressed_span_specialised`, which says what the tensors are; of one span whole."""
    N, H, splits = lse.shape
    places = seen if states is None else recent.shape[1]
    attend_compressed_span_specialised[(N * -(-H // 64), splits)](
        q, recent, ends, ends if states is None else states, cache, table, counts, sinks, partial, lse,
        scale, table_stride, H, splits, cache.shape[1], seen, first,
        states is not None, places, page, splits == 1, STAGES, True, num_warps=4, launch_pdl=True,
    )  # fmt: skip
