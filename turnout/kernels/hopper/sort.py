"""Sorting (token, expert) pairs by expert, and summing a token's results, without the host (Triton).

Pairs are counted and placed with atomics, so their order within an expert changes from run to run. Results
do not: a row's products depend on nothing but that row, whatever tile or place it falls into.

Atomics to one 32-byte sector of the L2 cache wait for each other. So programs count their pairs first and
add one number per expert, and the counters of pairs placed lie APART: 131072 pairs of 128 experts take 27 us
on an H200 instead of 54.

Legend: P pairs (tokens times top-k), E local experts, EP a power of two above E.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

APART = tl.constexpr(8)


@triton.jit(do_not_specialize=["P"])
def count_pairs(ids_ptr, counts_ptr, P, first, E, BLOCK: tl.constexpr, EP: tl.constexpr, PDL: tl.constexpr):
    """counts[e] += pairs of local expert e, for the ids of this program. EP: above E."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + i, mask=i < P, other=-1) - first
    pairs = tl.histogram(tl.where((expert >= 0) & (expert < E), expert, EP - 1), EP)
    e = tl.arange(0, EP)
    tl.atomic_add(counts_ptr + e, pairs, mask=(e < E) & (pairs > 0), sem="relaxed")


@triton.jit
def write_tiles(
    tiles_ptr, e, start, rows, tile_tokens, program, programs, WIDEST_FIRST: tl.constexpr
):  # fmt: skip
    """The table of tiles of `tile_tokens` rows, for experts e whose `rows` begin at `start`.

    int32: how many tiles, how many rows, two counters of those drawn (schedule.py), zero; then
    (expert, first row, end row, -) of each tile, at 4, 8, ... Expert by expert; WIDEST_FIRST: whole tiles,
    then those of more than three quarters of the width, of a half, of a quarter, and the rest. The programs
    share the tiles of each expert.
    """
    whole = (rows + tile_tokens - 1) // tile_tokens
    if program == 0:
        tl.store(tiles_ptr, tl.sum(whole, 0))
        tl.store(tiles_ptr + 1, tl.sum(rows, 0))
        tl.store(tiles_ptr + 2, 0)
        tl.store(tiles_ptr + 3, 0)
    if WIDEST_FIRST:
        whole = rows // tile_tokens
        row = start + whole * tile_tokens
        quarters = (4 * (rows - whole * tile_tokens) + tile_tokens - 1) // tile_tokens
        if program == 0:
            place = tl.sum(whole, 0)
            for q in tl.static_range(4, 0, -1):
                one = (quarters == q).to(tl.int32)
                entry = tiles_ptr + 4 + 4 * (place + tl.cumsum(one, 0) - one)
                _write_tile(entry, e, row, start + rows, quarters == q)
                place += tl.sum(one, 0)
    first_tile = tl.cumsum(whole, 0) - whole
    t = program
    most = tl.max(whole, 0)
    while t < most:
        row = start + t * tile_tokens
        entry = tiles_ptr + 4 + 4 * (first_tile + t)
        _write_tile(entry, e, row, tl.minimum(row + tile_tokens, start + rows), t < whole)
        t += programs


@triton.jit
def _write_tile(entry, e, row, end, exists):
    tl.store(entry, e, mask=exists)
    tl.store(entry + 1, row, mask=exists)
    tl.store(entry + 2, end, mask=exists)


@triton.jit(do_not_specialize=["P", "tile_tokens", "programs"])
def place_pairs(
    ids_ptr, counts_ptr, order_ptr, place_ptr, tiles_ptr, P, first, E, tile_tokens, programs,
    BLOCK: tl.constexpr, EP: tl.constexpr, COUNT: tl.constexpr, WIDEST_FIRST: tl.constexpr,
    PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the sorted pairs and the table of tiles.

    counts int32 [EP + EP * APART]: pairs per expert; then, in steps of APART, how many have been placed, and
    last how many programs are done; zero beforehand and afterwards. COUNT: one program does it all, and
    counts by itself.
    order int32 [P]: pair ids, expert by expert; pairs of other ranks and padding are left out.
    place int32 [P], where PLACES: where in `order` each pair is; -1: it was left out.
    tiles int32 [4 + 4 * tiles]: see `write_tiles`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, EP)
    expert = tl.load(ids_ptr + i, mask=i < P, other=-1) - first
    held = (expert >= 0) & (expert < E)
    expert = tl.where(held, expert, EP - 1)
    if COUNT:
        pairs = tl.where(e < E, tl.histogram(expert, EP), 0)
    else:
        pairs = tl.load(counts_ptr + e)
    start = tl.cumsum(pairs, 0) - pairs
    place = tl.gather(start, expert, 0)
    place += tl.atomic_add(counts_ptr + EP + expert * APART, 1, mask=held, sem="relaxed")
    tl.store(order_ptr + place, i, mask=held)
    if PLACES:
        tl.store(place_ptr + i, tl.where(held, place, -1), mask=i < P)
    write_tiles(tiles_ptr, e, start, pairs, tile_tokens, program, programs, WIDEST_FIRST)
    tl.debug_barrier()
    if COUNT:
        tl.store(counts_ptr + EP + e * APART, tl.zeros([EP], tl.int32))
    else:
        done_ptr = counts_ptr + EP + EP * APART - 1
        if tl.atomic_add(done_ptr, 1) == programs - 1:  # the others have read what they count on
            tl.store(counts_ptr + e, tl.zeros([EP], tl.int32))
            tl.store(counts_ptr + EP + e * APART, tl.zeros([EP], tl.int32))
            tl.store(done_ptr, 0)


@triton.jit(do_not_specialize=["capacity", "tile_tokens"])
def tile_batched_experts(counts_ptr, tiles_ptr, capacity, E, tile_tokens, EP: tl.constexpr):
    """The table of tiles for rows [E, capacity], of which the first counts[e] rows are in use."""
    e = tl.arange(0, EP)
    rows = tl.minimum(tl.load(counts_ptr + e, mask=e < E, other=0), capacity)
    write_tiles(tiles_ptr, e, e * capacity, rows, tile_tokens, 0, 1, False)


@triton.jit
def sum_pairs(
    y_ptr, ids_ptr, out_ptr, H, y_stride, first, E,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum of y[t * TOP_K + j] over the pairs that this rank holds, in order, in float32.

    y bf16 [P, H], out [T, H].
    """
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + j) - first
        held = (expert >= 0) & (expert < E)
        row = y_ptr + (token * TOP_K + j) * y_stride
        acc += tl.load(row + c, mask=(c < H) & held, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + c, acc.to(out_ptr.dtype.element_ty), mask=c < H)


@triton.jit
def sum_places(
    y_ptr, place_ptr, out_ptr, H,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `sum_pairs`, of sorted rows: that of pair i is y[place[i]], if there is one.

    FEW: most pairs are other ranks', and no registers are kept for them, so that more programs fit.
    """
    token = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(place_ptr + token * TOP_K + j).to(tl.int64)
        if FEW:
            if row >= 0:
                acc += tl.load(y_ptr + row * H + c, mask=c < H, other=0.0).to(tl.float32)
        else:
            acc += tl.load(y_ptr + row * H + c, mask=(c < H) & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * H + c, acc.to(out_ptr.dtype.element_ty), mask=c < H)
