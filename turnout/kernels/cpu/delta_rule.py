"""Tokens of several requests through a layer of Gated DeltaNet, in place in the requests' slots.

Convolution, gates, the state's update and the gated norm are one call. A piece of work is a key head of a
request, with its value heads, over all its tokens, one after the other; nothing is shared between pieces, so
a request gets the same bits in any batch and however its prompt is cut. Blocks of tokens, as the reference
has them, make matrix products of those with the state; but a state stays in the caches, and blocks cost more
than that saves: on one core of a Xeon with AVX-512, 512 tokens take 1.0 ms here and 13 ms in torch's blocks
for 8 value heads of 32, 13 and 25 ms for 8 of 128.
A state is read and written 16 columns at a time, which stay in the nearest cache between the two passes over
them. attention/delta_rule.py is the reference; everything is float32.

Legend: N tokens, B requests, X what the layer computed of a token, C channels of the convolution, W its
width, Hk/Hv key/value heads, R = Hv / Hk, Dk/Dv their sizes, multiples of 16.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from turnout.kernels.cpu.jit import inline, kernel
from turnout.kernels.cpu.phases import begin, end
from turnout.kernels.cpu.team import floats, integers, phased
from turnout.kernels.cpu.threads import threads_for
from turnout.kernels.cpu.vectors import (
    exp,
    fma,
    get_f32,
    get_i64,
    load,
    splat,
    stack,
    store,
    take,
    total,
    zeros,
)

MAX_HEAD = 256
SCRATCH = 4 * MAX_HEAD
ONE = np.float32(1.0)
FLOOR = np.float32(1e-6)  # added to squares of lengths
LINEAR_FROM = np.float32(20.0)  # where softplus(x) is x


@inline
def _silu(x):
    return x / (splat(ONE) + exp(zeros() - x))


@inline
def _convolve(row, window, conv, W, C, first, count, fresh, out):
    """out [count] = silu of the convolution of channels from `first` on; their window moves on by a token.

    window, conv: [W - 1, C] and [W, C]. fresh: whatever the window holds counts as zeros.
    """
    for c in range(first * 4, (first + count) * 4, 64):
        raw = load(row + c)
        sums = raw * load(conv + (W - 1) * C * 4 + c)
        for w in range(W - 1):
            seen = zeros() if fresh else load(window + w * C * 4 + c)
            sums = fma(seen, load(conv + w * C * 4 + c), sums)
            if w:
                store(window + (w - 1) * C * 4 + c, seen)
        store(window + (W - 2) * C * 4 + c, raw)
        store(out + c - first * 4, _silu(sums))


@inline
def _scale(at, D, by):
    """at [D] divided by its length and multiplied by `by`."""
    squares = zeros()
    for i in range(0, D * 4, 64):
        v = load(at + i)
        squares = fma(v, v, squares)
    scale = splat(by / np.float32(math.sqrt(total(squares) + FLOOR)))
    for i in range(0, D * 4, 64):
        store(at + i, load(at + i) * scale)


@inline
def _columns(state, q, k, v, out, Dk, Dv, keep, beta):
    """out [Dv] of a value head, 16 columns at a time; its state [Dk, Dv] moves on by a token."""
    for i in range(0, Dv * 4, 64):
        one, two, three, four = zeros(), zeros(), zeros(), zeros()  # so that no sum waits for the one before
        for j in range(0, Dk, 4):
            at = state + j * Dv * 4 + i
            one = fma(load(at), splat(get_f32(k + j * 4)), one)
            two = fma(load(at + Dv * 4), splat(get_f32(k + j * 4 + 4)), two)
            three = fma(load(at + Dv * 8), splat(get_f32(k + j * 4 + 8)), three)
            four = fma(load(at + Dv * 12), splat(get_f32(k + j * 4 + 12)), four)
        known = ((one + two) + (three + four)) * splat(keep)
        d = (load(v + i) - known) * splat(beta)
        one, two = zeros(), zeros()
        for j in range(0, Dk, 2):
            at = state + j * Dv * 4 + i
            first = fma(load(at), splat(keep), splat(get_f32(k + j * 4)) * d)
            second = fma(load(at + Dv * 4), splat(keep), splat(get_f32(k + j * 4 + 4)) * d)
            store(at, first)
            store(at + Dv * 4, second)
            one = fma(first, splat(get_f32(q + j * 4)), one)
            two = fma(second, splat(get_f32(q + j * 4 + 4)), two)
        store(out + i, one + two)


@inline
def _token(
    row, window, state, fresh, h, conv, W, decay, bias, norm, out, Hk, R, Dk, Dv, scale, eps, q, k, v
):  # fmt: skip
    """out [Hv * Dv] of the value heads of key head h of one token [X]; window [W - 1, C] and state
    [Hv, Dk, Dv] move on by it. fresh: whatever they hold counts as zeros. q, k, v: scratch."""
    Hv = Hk * R
    C = 2 * Hk * Dk + Hv * Dv
    _convolve(row, window, conv, W, C, h * Dk, Dk, fresh, q)
    _convolve(row, window, conv, W, C, (Hk + h) * Dk, Dk, fresh, k)
    _scale(q, Dk, scale)
    _scale(k, Dk, ONE)
    for g in range(h * R, (h + 1) * R):
        _convolve(row, window, conv, W, C, 2 * Hk * Dk + g * Dv, Dv, fresh, v)
        held = state + g * Dk * Dv * 4
        if fresh:
            for i in range(0, Dk * Dv * 4, 64):
                store(held + i, zeros())
        at = row + (C + Hv * Dv + g) * 4
        beta = ONE / (ONE + np.float32(math.exp(-get_f32(at))))
        a = get_f32(at + Hv * 4) + get_f32(bias + g * 4)
        soft = a if a > LINEAR_FROM else np.float32(math.log1p(math.exp(a)))
        keep = np.float32(math.exp(get_f32(decay + g * 4) * soft))
        to = out + g * Dv * 4
        _columns(held, q, k, v, to, Dk, Dv, keep, beta)
        squares = zeros()
        for i in range(0, Dv * 4, 64):
            o = load(to + i)
            squares = fma(o, o, squares)
        by = splat(ONE / np.float32(math.sqrt(total(squares) / np.float32(Dv) + eps)))
        for i in range(0, Dv * 4, 64):
            gate = _silu(load(row + (C + g * Dv) * 4 + i))
            store(to + i, load(to + i) * by * load(norm + i) * gate)


@kernel("void(" + "int64, " * 19 + "float32, float32)")
def _advance(
    counter, mixed, pitch, ends, slots, positions, B, windows, states, conv, W, decay, bias, norm, out,
    Hk, R, Dk, Dv, scale, eps,
):  # fmt: skip
    """out [N, Hv * Dv] of mixed [N, X], whose rows lie pitch bytes apart: request b has those up to ends[b],
    or row b alone where there are no ends. A position of 0 begins with zeros.

    windows [slots, W - 1, C], states [slots, Hv, Dk, Dv].
    """
    Hv = Hk * R
    C = 2 * Hk * Dk + Hv * Dv
    q, k, v = stack(SCRATCH), stack(SCRATCH), stack(SCRATCH)
    while True:
        job = take(counter)
        if job >= B * Hk:
            return
        b, h = job // Hk, job % Hk
        slot, fresh = get_i64(slots + b * 8), get_i64(positions + b * 8) == 0
        window, state = windows + slot * (W - 1) * C * 4, states + slot * Hv * Dk * Dv * 4
        first, end = b, b + 1
        if ends:
            first, end = get_i64(ends + b * 8 - 8) if b else 0, get_i64(ends + b * 8)
        for n in range(first, end):
            _token(
                mixed + n * pitch, window, state, fresh and n == first, h, conv, W, decay, bias, norm,
                out + n * Hv * Dv * 4, Hk, R, Dk, Dv, scale, eps, q, k, v,
            )  # fmt: skip


@phased(18, 2)
def _shared_advance(phases, threads, given):
    """`_advance`, by threads."""
    (
        mixed, pitch, ends, slots, positions, B, windows, states, conv, W, decay, bias, norm, out,
        Hk, R, Dk, Dv,
    ) = integers(given, 18)  # fmt: skip
    scale, eps = floats(given + 18 * 8, 2)
    begin(phases)
    _advance(
        phases, mixed, pitch, ends, slots, positions, B, windows, states, conv, W, decay, bias, norm, out,
        Hk, R, Dk, Dv, scale, eps,
    )  # fmt: skip
    end(phases)


def advance(
    mixed_NX: Tensor,
    slots_B: Tensor,
    positions_B: Tensor,
    windows_SWC: Tensor,
    states_SHKV: Tensor,
    conv_WC: Tensor,
    decay_H: Tensor,
    bias_H: Tensor,
    norm_V: Tensor,
    eps: float,
    ends_B: Tensor | None = None,
) -> Tensor:
    """[N, Hv Dv] of the tokens of each request, whose window and state, in its slot, move on by them.

    slots, positions: int64, contiguous; the latter of the first token. ends: int64 [B], where the tokens of
    each request end; None: each has one. windows [S, W - 1, C] and states [S, Hv, Dk, Dv]: contiguous.
    """
    N, B, Hv, Dk, Dv = len(mixed_NX), len(slots_B), *states_SHKV.shape[1:]
    Hk = (conv_WC.shape[1] - Hv * Dv) // (2 * Dk)
    out_NY = torch.empty(N, Hv * Dv)
    if B:
        ends = 0 if ends_B is None else ends_B.data_ptr()
        _shared_advance(
            threads_for(3 * N * Hv * Dk * Dv), None, mixed_NX.data_ptr(), mixed_NX.stride(0) * 4, ends,
            slots_B.data_ptr(), positions_B.data_ptr(), B, windows_SWC.data_ptr(), states_SHKV.data_ptr(),
            conv_WC.data_ptr(), len(conv_WC), decay_H.data_ptr(), bias_H.data_ptr(), norm_V.data_ptr(),
            out_NY.data_ptr(), Hk, Hv // Hk, Dk, Dv, Dk**-0.5, eps,
        )  # fmt: skip
    return out_NY
