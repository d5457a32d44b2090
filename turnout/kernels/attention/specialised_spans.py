"""What the specialised kernels of latent_specialised.py and compressed_specialised.py share (Gluon, Hopper),
and how prefill_specialised.py copies rows too.

Both have 64 heads in a program, whose keys are 512 values, which are its values too, or 576, of which the
last 64 are not. Four warps load tiles of 64 keys, four weigh them and add the left halves, four add the right
ones. Parts of queries and keys, each memory of its own: two halves of 256 columns, and what is left.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from turnout.kernels.hopper.schedule import advance

STAGES = 2  # there is no room for three


@gluon.jit
def tiles_memory(MORE: gl.constexpr, STAGES: gl.constexpr):
    """STAGES tiles of 64 rows, in parts of 256, 256 and, if any, MORE columns."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    parts = (
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], TILE),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], TILE),
    )
    if MORE > 0:
        parts += (gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, MORE], TILE),)  # type: ignore[assignment]
    return parts


@gluon.jit
def memory(MORE: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory and barriers of a program whose keys are 512 + MORE values.

    q and kept: queries, and STAGES tiles of keys, in parts; weights bf16 [64, 64] and shrink float32 [64] of
    a tile, for the right half. q_full, full [STAGES]: loaded; empty: of each part [STAGES]; sent, taken: of
    weights and shrink.
    """
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    one = tiles_memory(MORE, 1)
    q = gl.tuple([])
    for part in gl.static_range(len(one)):
        q = q + (one[part].index(0),)
    kept = tiles_memory(MORE, STAGES)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    shrink = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    sent = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.tuple([])
    for _ in gl.static_range(len(q)):
        empty = empty + (gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),)
    mbarrier.init(q_full.index(0), count=128)
    mbarrier.init(sent.index(0), count=1)
    mbarrier.init(taken.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)
        for part in gl.static_range(len(q)):
            mbarrier.init(empty[part].index(i), count=1)
    return q, kept, weights, shrink, q_full, full, empty, sent, taken


@gluon.jit
def copy_columns(to, rows, mask, FIRST: gl.constexpr, WIDTH: gl.constexpr, COPY: gl.constexpr):
    """Begin to copy WIDTH columns of `rows`, FIRST on, to shared memory, zeros where `mask` is false."""
    at = rows[:, None] + FIRST + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))[None, :]
    async_copy.async_copy_global_to_shared(to, at, mask=mask[:, None])


@gluon.jit
def load_queries(q_ptr, q, q_full, first_row, heads, i, D: gl.constexpr, COPY: gl.constexpr):
    """Begin to copy 64 queries [., D] from row first_row on, of which `heads` exist."""
    rows = q_ptr + (first_row + i).to(gl.int64) * D
    copy_columns(q[0], rows, i < heads, 0, 256, COPY)
    copy_columns(q[1], rows, i < heads, 256, 256, COPY)
    if D > 512:
        copy_columns(q[2], rows, i < heads, 512, D - 512, COPY)
    async_copy.mbarrier_arrive(q_full.index(0), increment_count=False)


@gluon.jit
def load_tile(kept, full, empty, stage, phase, rows, known, COPY: gl.constexpr):
    """Begin to copy a tile of keys, each part as its place becomes empty."""
    if len(kept) == 3:
        mbarrier.wait(empty[2].index(stage), phase)
        copy_columns(kept[2].index(stage), rows, known, 512, kept[2].shape[2], COPY)
    mbarrier.wait(empty[1].index(stage), phase)
    copy_columns(kept[1].index(stage), rows, known, 256, 256, COPY)
    mbarrier.wait(empty[0].index(stage), phase)
    copy_columns(kept[0].index(stage), rows, known, 0, 256, COPY)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def begin_scores(q, kept, stage):
    """Queries [64, D] @ tile [64, D].T begins: as many products to wait for as there are parts."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    scores = gl.zeros([64, 64], gl.float32, SCORES)
    scores = warpgroup_mma(q[0], kept[0].index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    for part in gl.static_range(1, len(q)):
        scores = warpgroup_mma(q[part], kept[part].index(stage).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def first_scores(q, kept, q_full, full):
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(full.index(0), 0)
    fence_async_shared()
    return warpgroup_mma_wait(0, deps=[begin_scores(q, kept, 0)])


@gluon.jit
def weigh(scores, best, total):
    """Of scores, -inf where a key is not seen: the softmax's maximum and sum (base 2), by what earlier sums
    shrink, and weights."""
    higher = gl.maximum(best, gl.max(scores, 1))
    least = gl.where(higher > float("-inf"), higher, 0.0)  # of an empty span
    change = gl.exp2(best - least)
    p = gl.exp2(scores - least[:, None])
    return higher, total * change + gl.sum(p, 1), change, p


@gluon.jit
def send(p, change, weights, shrink, sent, taken, turn):
    """Weights of a tile, and by what earlier sums shrink, to the warps that add the right half."""
    mbarrier.wait(taken.index(0), (turn & 1) ^ 1)
    weights.store(p.to(gl.bfloat16))
    shrink.store(change)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(sent.index(0), count=1)


@gluon.jit
def add_left(
    q, kept, weights, full, empty, acc, scores, change, stage, phase, turn, tiles, STAGES: gl.constexpr
):
    """acc with a tile's left half, meanwhile the scores of the next, if there is one, and its stage."""
    acc *= gl.convert_layout(change, gl.SliceLayout(1, acc.type.layout))[:, None]
    sums = warpgroup_mma(weights, kept[0].index(stage), acc, is_async=True)
    after, after_phase = advance(stage, phase, STAGES)
    if turn + 1 < tiles:
        mbarrier.wait(full.index(after), after_phase)
        fence_async_shared()
        later = begin_scores(q, kept, after)
        acc = warpgroup_mma_wait(len(q), deps=[sums])
        gl.thread_barrier()
        mbarrier.arrive(empty[0].index(stage), count=1)
        scores = warpgroup_mma_wait(0, deps=[later])
    else:
        acc = warpgroup_mma_wait(0, deps=[sums])
    return acc, scores, after, after_phase


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
