"""The experts of one layer on a CPU's bfloat16 units: as experts.py, with rows gathered into tiles (bf16.py).

    pairs -> up -> down

`up` gathers the tokens of an expert, up to some hundred at a time, multiplies them with panels of gate and up
together, and leaves the activation's output a, rounded to bfloat16, in tiles: each expert's pairs begin at a
tile of their own. `down` goes through all experts for some columns, adds weighted products to each
order of experts, and rounds the sums to bfloat16.

Rounded by torch afterwards, 256 tokens of the layer in docs/notes/cpu-kernels.md took 24 ms and not 19 on two
cores of an AMD EPYC, for torch's threads wait for more work by spinning, in the way of those of `up`.

Legend: T tokens, k top-k, P pairs, E local experts, H hidden, I intermediate, B panels of 16 columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.kernels.cpu.bf16 import (
    AMX,
    STEP,
    SUMS_PITCH,
    TILE,
    TILE_ROWS,
    UNITS,
    begin_tiles,
    end_tiles,
    products,
    store_bf16,
)
from turnout.kernels.cpu.experts import ACTIVATIONS, Layer, Pairs, activated, address
from turnout.kernels.cpu.jit import inline, kernel
from turnout.kernels.cpu.threads import parallel, threads_that_wait
from turnout.kernels.cpu.vectors import (
    LANES,
    fetch,
    fma,
    get_f32,
    get_i64,
    load,
    put_i64,
    splat,
    stack,
    store,
    take,
    zeros,
)

GATHERED = 2**19  # bytes of rows that a thread gathers at a time, about
BOTH = 2 * TILE_ROWS  # rows that are multiplied at a time
SUMS = BOTH * SUMS_PITCH  # bytes
FETCHED_ROWS = 3  # how far ahead of the row that is gathered
JOBS = 8  # of a thread: enough that none waits long for the others


@inline
def _gather(x, pitch, token, first, last, H, steps, rows):
    """Rows [first, last) of pairs, bfloat16 [H] at x + token * pitch each, to tiles at `rows`."""
    for p in range(first, last):
        source, r = x + get_i64(token + 8 * p) * pitch, p - first
        to = rows + r // TILE_ROWS * steps * TILE + r % TILE_ROWS * 64
        coming = x + get_i64(token + 8 * min(p + FETCHED_ROWS, last - 1)) * pitch
        for step in range(H // STEP):
            fetch(coming + step * 64)
            store(to + step * TILE, load(source + step * 64))
        if H % STEP:
            for i in range(0, 32, 8):
                put_i64(to + H // STEP * TILE + i, get_i64(source + H // STEP * 64 + i))


@kernel("void(" + "int64, " * 16 + "int64, float32, float32, float32, " + "int64, " * 5 + "int64)")
def _up(
    counter, units, x, pitch, starts, tiles, token, E, w, panel, factors, H, steps, B, columns, group,
    activation, alpha, beta, limit, bias, space, room, a, a_steps, halves
):  # fmt: skip
    """a: tiles [.., I / 32, 16, 32] of the activation of each pair's token times w [E, halves * B] panels.

    tiles [E]: the first tile of each expert's pairs in `a`. columns: panels of a unit of work; group: rows
    that are gathered at a time; room: bytes of `space` for each thread.
    """
    sums = stack(SUMS)
    rows = space + take(counter + 8) * room
    if units == AMX:
        begin_tiles()
    blocks = (B + columns - 1) // columns
    while True:
        job = take(counter)
        if job >= E * blocks:
            break
        e, block = job // blocks, job % blocks
        start, end = get_i64(starts + 8 * e), get_i64(starts + 8 * e + 8)
        after = splat(get_f32(factors + 4 * e))
        until = min(block * columns + columns, B)
        for begin in range(start, end, group):
            stop = min(end, begin + group)
            _gather(x, pitch, token, begin, stop, H, steps, rows)
            b = block * columns
            while b < until:
                count = min((4 if stop - begin <= TILE_ROWS else 2) // halves, until - b)
                gate = w + (e * halves * B + b) * panel
                other = gate + B * panel  # up's panels, after `count` of the gate's
                two = gate + panel if count > 1 else other
                three = gate + 2 * panel if halves == 1 else other
                four = three + panel
                for first in range(begin, stop, BOTH):
                    last = min(stop, first + BOTH)
                    at = rows + (first - begin) // TILE_ROWS * steps * TILE
                    products(
                        units, at, steps * TILE, last - first, gate, two, three, four, count * halves, steps,
                        sums, count * panel, 0,
                    )  # fmt: skip
                    for p in range(first, last):
                        place = tiles + 8 * e
                        to = a + (get_i64(place) + (p - start) // TILE_ROWS) * a_steps * TILE
                        to += (p - start) % TILE_ROWS * 64
                        line = sums + (p - first) * SUMS_PITCH
                        for c in range(count):
                            g = load(line + c * 64) * after
                            u = load(line + (count * (halves - 1) + c) * 64) * after
                            if bias:
                                g = g + load(bias + (e * halves * B + b + c) * 64)
                                u = u + load(bias + (e * halves * B + (halves - 1) * B + b + c) * 64)
                            v = activated(activation, g, u, alpha, beta, limit)
                            store_bf16(to + (b + c) // 2 * TILE + (b + c) % 2 * 32, v)
                b += count
    if units == AMX:
        end_tiles()


@inline
def _chosen(starts, e, E):
    """The first expert from e on that has pairs; E if none has."""
    while e < E and get_i64(starts + 8 * e) == get_i64(starts + 8 * e + 8):
        e += 1
    return e


@kernel("void(" + "int64, " * 17 + "int64)")
def _down(
    counter, units, a, starts, tiles, token, weight, E, T, w, panel, factors, steps, B, columns, bias, space,
    out
):  # fmt: skip
    """out [T, 16 B], bfloat16 = per token the sum over its pairs, by expert, of weight * (a times w[e]).

    w: [E, B] panels. columns: panels of a unit of work. bias: float32 [E, 16 B], or 0. space: float32
    [T, 16 columns] for each thread, where tokens' sums are made.
    """
    sums = stack(SUMS)
    totals = space + take(counter + 8) * T * columns * 64
    if units == AMX:
        begin_tiles()
    blocks = (B + columns - 1) // columns
    while True:
        job = take(counter)
        if job >= blocks:
            break
        begin, until = job * columns, min(job * columns + columns, B)
        for to in range(totals, totals + T * columns * 64, 64):
            store(to, zeros())
        e = _chosen(starts, 0, E)
        while e < E:
            start, end = get_i64(starts + 8 * e), get_i64(starts + 8 * e + 8)
            after = splat(get_f32(factors + 4 * e))
            place = tiles + 8 * e
            rows = a + get_i64(place) * steps * TILE
            rows_ahead = (end - start + TILE_ROWS - 1) // TILE_ROWS * steps * TILE
            following = _chosen(starts, e + 1, E)
            b = begin
            while b < until:
                count = min(4 if end - start <= TILE_ROWS else 2, until - b)
                one = w + (e * B + b) * panel
                ahead = count * panel if b + count < until else ((following - e) * B + begin - b) * panel
                for first in range(start, end, BOTH):
                    last = min(end, first + BOTH)
                    at = rows + (first - start) // TILE_ROWS * steps * TILE
                    products(
                        units, at, steps * TILE, last - first, one, one + panel, one + 2 * panel,
                        one + 3 * panel, count, steps, sums, ahead, rows_ahead,
                    )  # fmt: skip
                    for p in range(first, last):
                        factor = splat(get_f32(weight + 4 * p))
                        to = totals + (get_i64(token + 8 * p) * columns + b - begin) * 64
                        for c in range(count):
                            y = load(sums + (p - first) * SUMS_PITCH + c * 64) * after
                            if bias:
                                y = y + load(bias + (e * B + b + c) * 64)
                            store(to + c * 64, fma(factor, y, load(to + c * 64)))
                b += count
            e = following
        for t in range(T):
            for b in range(begin, until):
                store_bf16(out + (t * B + b) * 32, load(totals + (t * columns + b - begin) * 64))
    if units == AMX:
        end_tiles()


def run(layer: Layer, x_RH: Tensor, pairs: Pairs, rows: int, units: str) -> Tensor:
    """bfloat16 [rows, H]: of each row the weighted sum over its pairs, zero where it has none.

    x: bfloat16; both matrices of the layer in pairs (panels.py). units: "amx_bf16" or "avx512_bf16", which
    this processor must have.
    """
    x_RH = x_RH.contiguous()
    w13, w2 = layer.w13, layer.w2
    H, E, inner = w13.inputs, w13.experts, w2.inputs
    steps, inner_steps = w13.data.shape[2] * 2 // STEP, w2.data.shape[2] * 2 // STEP
    counts_E = pairs.starts.diff()
    tiles_E = (counts_E + TILE_ROWS - 1) // TILE_ROWS
    tiles = tiles_E.cumsum(0)
    make = torch.empty if inner % STEP == 0 else torch.zeros
    a = make(max(int(tiles[-1]), 1) + 1, inner_steps, TILE_ROWS, STEP, dtype=torch.bfloat16)
    tiles -= tiles_E
    threads = threads_that_wait(pairs.count * 3 * inner * H / 8)
    group = max(GATHERED // (2 * steps * STEP) // BOTH, 1) * BOTH
    group = min(group, max(-(-int(counts_E.max()) // BOTH), 1) * BOTH)
    make = torch.empty if H % STEP == 0 else torch.zeros
    space = make(threads, group, steps * STEP, dtype=torch.bfloat16)
    blocks, busy = inner // LANES, max(int(counts_E.count_nonzero()), 1)
    columns = max(blocks * busy // (JOBS * threads), 4) if threads > 1 and busy < JOBS * threads else blocks
    kind = UNITS[units]
    parallel(
        _up, threads, kind, x_RH.data_ptr(), 2 * H, pairs.starts.data_ptr(),
        tiles.data_ptr(), pairs.token.data_ptr(), E, w13.data.data_ptr(), w13.panel_bytes,
        w13.factors.data_ptr(), H, steps, blocks, columns, group, ACTIVATIONS[layer.activation], layer.alpha,
        layer.beta, layer.limit, address(layer.b13), space.data_ptr(), group * steps * STEP * 2, a.data_ptr(),
        inner_steps, w13.outputs // inner,
    )  # fmt: skip
    blocks = w2.outputs // LANES
    columns = blocks if threads == 1 else max(4, blocks // (4 * threads))
    threads = min(threads, -(-blocks // columns))
    totals = torch.empty(threads, rows, columns * LANES)
    out_RH = torch.empty(rows, w2.outputs, dtype=torch.bfloat16)
    parallel(
        _down, threads, kind, a.data_ptr(), pairs.starts.data_ptr(), tiles.data_ptr(),
        pairs.token.data_ptr(), pairs.weight.data_ptr(), E, rows, w2.data.data_ptr(), w2.panel_bytes,
        w2.factors.data_ptr(), inner_steps, blocks, columns, address(layer.b2), totals.data_ptr(),
        out_RH.data_ptr(),
    )  # fmt: skip
    return out_RH
