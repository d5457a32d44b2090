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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.attention.specialised_spans import (
    STAGES,
    add,
    add_left,
    first_scores,
    load_queries,
    load_tile,
    memory,
    send,
    store_half,
    weigh,
)
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
    load_queries(q_ptr, q, q_full, first_row, heads, i, 512, COPY)
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
        load_tile(kept, full, empty, stage, phase, rows, known, COPY)
        stage, phase = advance(stage, phase, STAGES)


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
    scores = first_scores(q, kept, q_full, full)
    for turn in range(0, tiles):
        place = start + turn * 64 + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        _, seen = recent_places(place, end, SEEN, FIRST, RING, RECENT)
        known = (place < stop) & (seen | (place >= WIDTH))
        scores = gl.where(known[None, :], scores * scale, float("-inf"))
        best, total, change, p = weigh(scores, best, total)
        send(p, change, weights, shrink, sent, taken, turn)
        acc, scores, stage, phase = add_left(
            q, kept, weights, full, empty, acc, scores, change, stage, phase, turn, tiles, STAGES
        )
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
    q, kept, weights, shrink, q_full, full, empty, sent, taken = memory(0, STAGES)
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
