"""The experts of one layer on a CPU: rows sorted by expert, up with activation, down with the weighted sum.

    pairs -> up -> down

A (token, expert) choice that this rank holds is a pair. `up` reads each pair's token where it is and leaves
the activation's output a [P, I]; `down` multiplies that and adds, weighted, to the token's output, going
through the experts in order of their ids, so that a token's sum has one order whatever else is in the batch.
Neither gathers rows nor writes products that another pass would read.

Work is cut for threads by experts and columns for `up`, by columns only for `down`, where threads then never
write to the same values.

Legend: T tokens, k top-k, P pairs, E local experts, H hidden, I intermediate, B panels of 16 columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnout.kernels.cpu.jit import inline, kernel
from turnout.kernels.cpu.panels import Panels, panels_at_once, readable, unpacks
from turnout.kernels.cpu.phases import PHASE, begin, end
from turnout.kernels.cpu.team import floats, integers, phased
from turnout.kernels.cpu.threads import threads_for
from turnout.kernels.cpu.tiles import BF16_PANEL, F32_PANEL, ROWS, groups, products
from turnout.kernels.cpu.vectors import (
    LANES,
    exp,
    fma,
    get_f32,
    get_i32,
    get_i64,
    larger,
    load,
    put_f32,
    put_i64,
    smaller,
    splat,
    stack,
    store,
    take,
    zeros,
)

SILU, SWIGLU, RELU2 = range(3)
ACTIVATIONS = {"silu": SILU, "swiglu": SWIGLU, "relu2": RELU2}
COLUMNS = 4  # panels of a unit of work of `up`
PITCH = 256  # bytes between the rows of a tile of 4 panels
ROW_ADDRESSES, TILE = 8 * ROWS, PITCH * ROWS  # bytes
ONE = np.float32(1.0)


@kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _pairs(ids, weights, T, k, first, E, starts, token, weight):
    """starts [E + 1]; of each pair, sorted by expert and then by token, token and weight. Returns P."""
    for e in range(E + 1):
        put_i64(starts + 8 * e, 0)
    for p in range(T * k):
        e = np.int64(get_i32(ids + 4 * p)) - first
        if 0 <= e < E:
            put_i64(starts + 8 * (e + 1), get_i64(starts + 8 * (e + 1)) + 1)
    for e in range(E):
        put_i64(starts + 8 * (e + 1), get_i64(starts + 8 * (e + 1)) + get_i64(starts + 8 * e))
    for p in range(T * k):
        e = np.int64(get_i32(ids + 4 * p)) - first
        if 0 <= e < E:
            at = get_i64(starts + 8 * e)
            put_i64(starts + 8 * e, at + 1)
            put_i64(token + 8 * at, p // k)
            put_f32(weight + 4 * at, get_f32(weights + 4 * p))
    for e in range(E - 1, 0, -1):  # each start has moved to the next one
        put_i64(starts + 8 * e, get_i64(starts + 8 * (e - 1)))
    put_i64(starts, 0)
    return get_i64(starts + 8 * E)


@inline
def activated(kind, gate, up, alpha, beta, limit):
    """[16] of the activation; `up` is the gate where there is none."""
    if kind == RELU2:
        gate = larger(gate, zeros())
        return gate * gate
    if kind == SWIGLU:
        gate = smaller(gate, splat(limit))
        up = larger(smaller(up, splat(limit)), splat(-limit)) + splat(beta)
    return gate / (splat(ONE) + exp(splat(-alpha) * gate)) * up


@inline
def _rows_of(x, pitch, token, first, last, rows):
    """Put at `rows` the addresses of the tokens of pairs [first, last)."""
    for p in range(first, last):
        put_i64(rows + 8 * (p - first), x + get_i64(token + 8 * p) * pitch)


@kernel("void(" + "int64, " * 14 + "int64, float32, float32, float32, int64, int64, int64, int64)")
def _up(
    counter, x, pitch, starts, token, E, w, kind, panel, scales, scale, factors, H, B,
    activation, alpha, beta, limit, bias, space, room, a
):  # fmt: skip
    """a [P, 16 B] = activation of each pair's token times w [E, halves * B] panels [H, 16].

    panel, scale: bytes of a panel and of its scales. bias: float32 [E, halves * B * 16], or 0. space:
    `room` bytes for each thread, for panels that it unpacks.
    """
    rows, gates, ups = stack(ROW_ADDRESSES), stack(TILE), stack(TILE)
    gate_space = space + take(counter + 8) * room
    halves = 1 if activation == RELU2 else 2
    blocks = (B + COLUMNS - 1) // COLUMNS
    while True:
        job = take(counter)
        if job >= E * blocks:
            return
        e, block = job // blocks, job % blocks
        start, end = get_i64(starts + 8 * e), get_i64(starts + 8 * e + 8)
        if start == end:
            continue
        unpacked = unpacks(kind, end - start)
        read, stride = (F32_PANEL, 64 * H) if unpacked else (kind, panel)
        tiles, at_once = groups(end - start), panels_at_once(unpacked, end - start, H)
        factor = get_f32(factors + 4 * e) if factors else ONE
        after = splat(factor if kind <= BF16_PANEL else ONE)  # others were unpacked with it
        b, until = block * COLUMNS, min(block * COLUMNS + COLUMNS, B)
        while b < until:
            count = min(at_once, until - b)
            i = e * halves * B + b
            gate_at = readable(
                unpacked, kind, w + i * panel, panel, scales + i * scale, scale, factor, H, count, gate_space
            )
            up_at = gate_at
            if halves == 2:
                i += B
                up_at = readable(
                    unpacked, kind, w + i * panel, panel, scales + i * scale, scale, factor, H, count,
                    gate_space + at_once * H * 64,
                )  # fmt: skip
            for tile in range(tiles):
                first = start + tile * (end - start) // tiles
                last = start + (tile + 1) * (end - start) // tiles
                _rows_of(x, pitch, token, first, last, rows)
                products(read, last - first, rows, gate_at, stride, count, H, gates, PITCH)
                if halves == 2:
                    products(read, last - first, rows, up_at, stride, count, H, ups, PITCH)
                for p in range(first, last):
                    for c in range(count):
                        at = (p - first) * PITCH + c * 64
                        gate, up = load(gates + at) * after, load(ups + at) * after
                        if bias:
                            gate = gate + load(bias + (e * halves * B + b + c) * 64)
                            up = up + load(bias + (e * halves * B + (halves - 1) * B + b + c) * 64)
                        store(a + (p * B + b + c) * 64, activated(activation, gate, up, alpha, beta, limit))
            b += count


@kernel("void(" + "int64, " * 20 + "int64)")
def _down(
    counter, a, starts, token, weight, E, T, w, kind, panel, scales, scale, factors, inner, B, columns, bias,
    space, room, onto, out
):  # fmt: skip
    """out [T, 16 B] = per token the sum over its pairs, by expert, of weight * (a [P, inner] times w[e]).

    w: [E, B] panels [inner, 16]. columns: panels of a unit of work. bias: float32 [E, 16 B], or 0. onto:
    whether that is added to what `out` holds. space: `room` bytes for each thread, for panels it unpacks.
    """
    rows, sums = stack(ROW_ADDRESSES), stack(TILE)
    space += take(counter + 8) * room
    blocks = (B + columns - 1) // columns
    while True:
        job = take(counter)
        if job >= blocks:
            return
        begin, until = job * columns, min(job * columns + columns, B)
        for t in range(0 if onto else T):
            for b in range(begin, until):
                store(out + (t * B + b) * 64, zeros())
        for e in range(E):
            start, end = get_i64(starts + 8 * e), get_i64(starts + 8 * e + 8)
            if start == end:
                continue
            unpacked = unpacks(kind, end - start)
            read, stride = (F32_PANEL, 64 * inner) if unpacked else (kind, panel)
            tiles, at_once = groups(end - start), panels_at_once(unpacked, end - start, inner)
            factor = get_f32(factors + 4 * e) if factors else ONE
            after = splat(factor if kind <= BF16_PANEL else ONE)  # others were unpacked with it
            b = begin
            while b < until:
                count = min(at_once, until - b)
                i = e * B + b
                panels_at = readable(
                    unpacked, kind, w + i * panel, panel, scales + i * scale, scale, factor, inner, count,
                    space,
                )  # fmt: skip
                for tile in range(tiles):
                    first = start + tile * (end - start) // tiles
                    last = start + (tile + 1) * (end - start) // tiles
                    for p in range(first, last):
                        put_i64(rows + 8 * (p - first), a + p * inner * 4)
                    products(read, last - first, rows, panels_at, stride, count, inner, sums, PITCH)
                    for p in range(first, last):
                        factor_p = splat(get_f32(weight + 4 * p))
                        to = out + (get_i64(token + 8 * p) * B + b) * 64
                        for c in range(count):
                            y = load(sums + (p - first) * PITCH + c * 64) * after
                            if bias:
                                y = y + load(bias + (i + c) * 64)
                            store(to + c * 64, fma(factor_p, y, load(to + c * 64)))
                b += count


@phased(31, 3)
def _experts(phases, threads, given):
    """`_up`, then `_down`. w13, w2: see `matrices`."""
    (
        x, pitch, starts, token, weight, E, T,
        w13, kind13, panel13, scales13, scale13, factors13, w2, kind2, panel2, scales2, scale2, factors2,
        H, inner, up_blocks, down_blocks, columns, activation, b13, b2, space, room, a, out,
    ) = integers(given, 31)  # fmt: skip
    alpha, beta, limit = floats(given + 31 * 8, 3)
    begin(phases)
    _up(
        phases, x, pitch, starts, token, E, w13, kind13, panel13, scales13, scale13, factors13, H, up_blocks,
        activation, alpha, beta, limit, b13, space, room, a,
    )  # fmt: skip
    end(phases)
    phases += PHASE
    begin(phases)
    _down(
        phases, a, starts, token, weight, E, T, w2, kind2, panel2, scales2, scale2, factors2, inner,
        down_blocks, columns, b2, space, room, False, out,
    )  # fmt: skip
    end(phases)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The experts of one layer. w13: gate rows first, then up rows (no up rows for relu2); biases float32."""

    w13: Panels  # [E, 2 I, H]
    w2: Panels  # [E, H, I]
    b13: Tensor | None = None
    b2: Tensor | None = None
    activation: str = "silu"  # or swiglu, relu2
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    def scratch(self, rows: int) -> int:
        """Float32 values that a thread needs to unpack panels, where an expert gets up to `rows` rows."""
        halves = 1 if self.activation == "relu2" else 2
        return max(halves * self.w13.scratch(rows), self.w2.scratch(rows))

    def columns(self, threads: int) -> int:
        """Panels of a unit of work of `down`."""
        blocks = self.w2.outputs // LANES
        return blocks if threads == 1 else max(COLUMNS, blocks // (4 * threads))


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """starts: int64 [E + 1], where each expert's pairs begin. token: int64 [P]; weight: float32 [P]."""

    starts: Tensor
    token: Tensor
    weight: Tensor
    count: int


def sort_pairs(ids_TK: Tensor, weights_TK: Tensor, first: int, experts: int) -> Pairs:
    """Choices of experts [first, first + experts), sorted; ids int32, weights float32."""
    ids_TK, weights_TK = ids_TK.contiguous(), weights_TK.contiguous()
    T, k = ids_TK.shape
    starts, token = torch.empty(experts + 1, dtype=torch.int64), torch.empty(T * k, dtype=torch.int64)
    weight = torch.empty(T * k, dtype=torch.float32)
    count = _pairs(
        ids_TK.data_ptr(), weights_TK.data_ptr(), T, k, first, experts,
        starts.data_ptr(), token.data_ptr(), weight.data_ptr(),
    )  # fmt: skip
    return Pairs(starts=starts, token=token, weight=weight, count=count)


def batched_pairs(counts_E: Tensor, capacity: int) -> Pairs:
    """The rows in use of [E, capacity], numbered through, each with weight 1."""
    counts_E = counts_E.to(torch.int64)
    used_EC = torch.arange(capacity) < counts_E[:, None]
    token = used_EC.flatten().nonzero().squeeze(1)
    starts = torch.cat((counts_E.new_zeros(1), counts_E.cumsum(0)))
    return Pairs(starts=starts, token=token, weight=torch.ones(len(token)), count=len(token))


def run(layer: Layer, x_RH: Tensor, pairs: Pairs, rows: int) -> Tensor:
    """float32 [rows, H]: of each row the weighted sum over its pairs, zero where it has none. x: float32."""
    x_RH = x_RH.contiguous()
    H, E = layer.w13.inputs, layer.w13.experts
    inner = layer.w2.inputs
    a_PI, out_RH = torch.empty(pairs.count, inner), torch.empty(rows, layer.w2.outputs)
    threads = threads_for(pairs.count * 3 * inner * H)
    room = layer.scratch(pairs.count)
    space = torch.empty(threads, room)
    _experts(
        threads, layer, x_RH.data_ptr(), 4 * H, pairs.starts.data_ptr(), pairs.token.data_ptr(),
        pairs.weight.data_ptr(), E, rows, *matrices(layer.w13), *matrices(layer.w2), H, inner, inner // LANES,
        layer.w2.outputs // LANES, layer.columns(threads), ACTIVATIONS[layer.activation], address(layer.b13),
        address(layer.b2), space.data_ptr(), 4 * room, a_PI.data_ptr(), out_RH.data_ptr(), layer.alpha,
        layer.beta, layer.limit,
    )  # fmt: skip
    return out_RH


def matrices(w: Panels) -> tuple[int, ...]:
    """What kernels are told of a stack of matrices."""
    return (
        w.data.data_ptr(), w.kind, w.panel_bytes, w.scales.data_ptr(), w.scale_bytes, w.factors.data_ptr(),
    )  # fmt: skip


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
