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
def load_tiles(
    q_ptr, cache_ptr, table_at, q, kept, q_full, full, empty, first_row, heads, start, stop, tiles,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The queries, then tile after tile, each of its three parts as its place becomes empty. Four warps."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, 64, gl.SliceLayout(1, COPY))
    load_queries(q_ptr, q, q_full, first_row, heads, i, 576, COPY)
    place = start + i
    page = gl.load(table_at + place // PAGE, mask=place < stop, other=0)
    stage = 0
    phase = 1
    for _ in range(0, tiles):
        rows = cache_ptr + (page.to(gl.int64) * PAGE + place % PAGE) * 576
        known = place < stop
        place += 64
        page = gl.load(table_at + place // PAGE, mask=place < stop, other=0)
        load_tile(kept, full, empty, stage, phase, rows, known, COPY)
        stage, phase = advance(stage, phase, STAGES)


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
    scores = first_scores(q, kept, q_full, full)
    for turn in range(0, tiles):
        gl.thread_barrier()
        mbarrier.arrive(empty[2].index(stage), count=1)
        scores = gl.where((place < stop)[None, :], scores * scale, float("-inf"))
        best, total, change, p = weigh(scores, best, total)
        place += 64
        send(p, change, weights, shrink, sent, taken, turn)
        acc, scores, stage, phase = add_left(
            q, kept, weights, full, empty, acc, scores, change, stage, phase, turn, tiles, STAGES
        )
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
    q, kept, weights, shrink, q_full, full, empty, sent, taken = memory(64, STAGES)
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
