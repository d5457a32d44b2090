"""Many tokens of one request through Gated DeltaNet in Triton, in blocks of 64.

Four launches take 1024 tokens: convolution; what blocks need of themselves; states from block to block,
columns of a head by themselves; the gated norm. Everything is computed in float32. Products are of tf32,
finer than the bfloat16 that they come from, or, where float32 is the compute type, of three parts of it,
whose error is about float32's. attention/delta_rule.py has the formulas, and is the reference.

With torch's operations in place of the first two and the last, a prompt of 2048 tokens of Qwen3.5-35B-A3B
(NVFP4) took 138 ms on an H200, eight 1061 ms; so they take 72 and 321.

The triangular system of a block is solved by its inverse. Its diagonal parts of 16 x 16 are inverted a row at
a time, all four together, as powers of such a part would lose float32's digits where keys are alike. With D
these inverses and N = D (the rest), whose fourth power is 0, the inverse is (I - N) (I + N^2) D.

Legend: T tokens, X what the layer computed of a token, C channels of the convolution, W its width, Hk/Hv
key/value heads, R = Hv / Hk, Dk/Dv their sizes, DkP/DvP powers of two from these on; n blocks of L tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
SPAN = 1024  # tokens whose blocks are prepared together: bounds the memory that a prompt takes
COLUMNS = 32  # of a state, that a program takes over the blocks
TOKENS = 16  # that a program convolves or gates


@triton.jit(do_not_specialize=["T"])
def convolve_heads(
    mixed_ptr, window_ptr, conv_ptr, out_ptr, T, X, Hk, scale,
    R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, W: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """out float32 [n L, C]: queries of length `scale`, keys of length 1 and values, 0 from T on.

    Of mixed [T, X], which window [W - 1, C] precedes. A program has one of Hk + Hk + Hv heads.
    """
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    h = tl.program_id(1)
    C = 2 * Hk * DK + Hk * R * DV
    i = tl.arange(0, DP)
    is_value = h >= 2 * Hk
    size = tl.where(is_value, DV, DK)
    c = tl.where(is_value, 2 * Hk * DK + (h - 2 * Hk) * DV, h * DK) + i
    held = i < size
    known = (t < T)[:, None] & held[None, :]
    x = tl.zeros([TOKENS, DP], tl.float32)
    for w in tl.static_range(W):
        at = (t + (w - W + 1))[:, None]
        now = tl.load(mixed_ptr + at.to(tl.int64) * X + c[None, :], mask=known & (at >= 0), other=0.0)
        before = tl.load(window_ptr + (at + (W - 1)) * C + c[None, :], mask=known & (at < 0), other=0.0)
        weight = tl.load(conv_ptr + w * C + c, mask=held, other=0.0)
        x += (now + before).to(tl.float32) * weight.to(tl.float32)[None, :]
    x /= 1.0 + tl.exp(-x)
    length = tl.rsqrt(tl.sum(x * x, 1) + 1e-6) * tl.where(h < Hk, scale, 1.0)
    x *= tl.where(is_value, 1.0, length)[:, None]
    tl.store(out_ptr + t.to(tl.int64)[:, None] * C + c[None, :], x, mask=held[None, :])


@triton.jit
def inverse(lower, L: tl.constexpr, PRECISION: tl.constexpr):
    """Of I + lower [L, L], which is 0 on the diagonal and above; L = 64."""
    row = tl.arange(0, L)[:, None]
    column = tl.arange(0, L)[None, :]
    same = row // 16 == column // 16
    parts = tl.where(same, lower, 0.0)
    found = tl.where(row == column, 1.0, 0.0)
    for r in range(1, 16):
        weights = tl.sum(tl.where(row % 16 == r, parts, 0.0), 0)  # row r of the part that a column belongs to
        new = -tl.sum(weights[:, None] * found, 0)
        found = tl.where((row % 16 == r) & same & (column < row), new[None, :], found)
    rest = tl.dot(found, lower - parts, input_precision=PRECISION)
    squared = tl.dot(rest, rest, input_precision=PRECISION)
    found += tl.dot(squared, found, input_precision=PRECISION)
    return found - tl.dot(rest, found, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T"])
def prepare_blocks(
    mixed_ptr, qkv_ptr, decay_ptr, bias_ptr, solved_ptr, scores_ptr, q_ptr, k_ptr, ends_ptr, T, X, Hk,
    R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of mixed [T, X] and what `convolve_heads` made of it, for each value head and block, in float32:

    solved [Hv, n, L, DV + DK]: beta V and beta exp(G) K, solved; scores [Hv, n, L, L]: what a token's query
    takes of each D; q, k [Hv, n, L, DK]: decayed from the block's begin and to its end; ends [Hv, n].
    """
    n = tl.program_id(0)
    h = tl.program_id(1)
    Hv = Hk * R
    C = 2 * Hk * DK + Hv * DV
    s = tl.arange(0, L)
    i = tl.arange(0, DKP)
    j = tl.arange(0, DVP)
    t = n * L + s
    known, keys, values = t < T, (i < DK)[None, :], (j < DV)[None, :]
    row = mixed_ptr + t.to(tl.int64) * X + C + Hv * DV + h
    beta = 1.0 / (1.0 + tl.exp(-tl.load(row, mask=known, other=0.0).to(tl.float32)))
    beta = tl.where(known, beta, 0.0)
    a = tl.load(row + Hv, mask=known, other=0.0).to(tl.float32) + tl.load(bias_ptr + h)
    soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(a)))
    g = tl.where(known, tl.load(decay_ptr + h) * soft, 0.0)
    sums = tl.cumsum(g, 0)
    end = tl.sum(g, 0)
    convolved = qkv_ptr + t.to(tl.int64)[:, None] * C
    key = convolved + (Hk + h // R) * DK + i[None, :]
    k = tl.load(key, mask=keys, other=0.0)
    below = s[:, None] > s[None, :]
    decay = tl.exp(tl.where(below, sums[:, None] - sums[None, :], 0.0))
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    solve = inverse(tl.where(below, beta[:, None] * decay * alike, 0.0), L, PRECISION)
    b = (h * tl.num_programs(0) + n).to(tl.int64)
    rows = (b * L + s)[:, None]
    k = tl.load(key, mask=keys, other=0.0)
    solved = tl.dot(solve, k * (beta * tl.exp(sums))[:, None], input_precision=PRECISION)
    tl.store(solved_ptr + rows * (DV + DK) + DV + i[None, :], solved, mask=keys)
    v = tl.load(convolved + 2 * Hk * DK + h * DV + j[None, :], mask=values, other=0.0)
    solved = tl.dot(solve, v * beta[:, None], input_precision=PRECISION)
    tl.store(solved_ptr + rows * (DV + DK) + j[None, :], solved, mask=values)
    q = tl.load(convolved + h // R * DK + i[None, :], mask=keys, other=0.0)
    scores = decay * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    tl.store(scores_ptr + rows * L + s[None, :], tl.where(s[:, None] >= s[None, :], scores, 0.0))
    tl.store(q_ptr + rows * DK + i[None, :], q * tl.exp(sums)[:, None], mask=keys)
    tl.store(k_ptr + rows * DK + i[None, :], k * tl.exp(end - sums)[:, None], mask=keys)
    tl.store(ends_ptr + b, tl.exp(end))


@triton.jit(do_not_specialize=["blocks"])
def carry_columns(
    solved_ptr, scores_ptr, q_ptr, k_ptr, ends_ptr, state_ptr, out_ptr, blocks,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, COLUMNS: tl.constexpr, L: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take columns of the state of a value head over all blocks, with what `prepare_blocks` gives of them.

    out [Hv, blocks, L, DV]: S^T q of every token.
    """
    h = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, DKP)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, L)
    keys, values = i < DK, j < DV
    at = state_ptr + (h * DK + i[:, None]) * DV + j[None, :]
    held = keys[:, None] & values[None, :]
    state = tl.load(at, mask=held, other=0.0)
    for n in range(blocks):
        b = h * blocks + n
        rows = b * L + t
        known = tl.load(
            solved_ptr + rows[:, None] * (DV + DK) + DV + i[None, :], mask=keys[None, :], other=0.0
        )
        d = tl.load(solved_ptr + rows[:, None] * (DV + DK) + j[None, :], mask=values[None, :], other=0.0)
        d -= tl.dot(known, state, input_precision=PRECISION)
        q = tl.load(q_ptr + rows[:, None] * DK + i[None, :], mask=keys[None, :], other=0.0)
        scores = tl.load(scores_ptr + rows[:, None] * L + t[None, :])
        out = tl.dot(q, state, input_precision=PRECISION) + tl.dot(scores, d, input_precision=PRECISION)
        tl.store(out_ptr + rows[:, None] * DV + j[None, :], out, mask=values[None, :])
        k = tl.load(k_ptr + rows[None, :] * DK + i[:, None], mask=keys[:, None], other=0.0)
        state = state * tl.load(ends_ptr + b) + tl.dot(k, d, input_precision=PRECISION)
    tl.store(at, state, mask=held)


@triton.jit(do_not_specialize=["T", "rows"])
def gate_heads(
    o_ptr, mixed_ptr, norm_ptr, out_ptr, T, rows, X, Hk, eps,
    R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """out [T, Hv * DV]: norm(o) * silu(z), of o float32 [Hv, rows, DV] and z in mixed [T, X]."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    h = tl.program_id(1)
    j = tl.arange(0, DVP)
    Hv = Hk * R
    C = 2 * Hk * DK + Hv * DV
    held = (t < T)[:, None] & (j < DV)[None, :]
    at = t.to(tl.int64)[:, None]
    o = tl.load(o_ptr + (h.to(tl.int64) * rows + at) * DV + j[None, :], mask=held, other=0.0)
    z = tl.load(mixed_ptr + at * X + C + h * DV + j[None, :], mask=held, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + j, mask=j < DV, other=0.0).to(tl.float32)
    y = o * tl.rsqrt(tl.sum(o * o, 1) / DV + eps)[:, None] * norm[None, :] * z / (1.0 + tl.exp(-z))
    tl.store(out_ptr + at * (Hv * DV) + h * DV + j[None, :], y.to(out_ptr.dtype.element_ty), mask=held)


def advance(
    mixed_TX: Tensor,
    window_WC: Tensor,
    state_HKV: Tensor,
    conv_WC: Tensor,
    decay_H: Tensor,
    bias_H: Tensor,
    norm_V: Tensor,
    eps: float,
) -> Tensor:
    """[T, Hv Dv]; as `attention.delta_rule.advance`. window [W - 1, C] and state [Hv, Dk, Dv]: contiguous."""
    mixed_TX = mixed_TX.contiguous()
    out_TY = mixed_TX.new_empty(len(mixed_TX), norm_V.numel() * len(state_HKV))
    for mixed, out in zip(mixed_TX.split(SPAN), out_TY.split(SPAN), strict=True):
        _advance_span(mixed, window_WC, state_HKV, (conv_WC, decay_H, bias_H), norm_V, eps, out)
    return out_TY


def _advance_span(
    mixed: Tensor,
    window: Tensor,
    state: Tensor,
    learned: tuple[Tensor, ...],
    norm: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    (T, X), (Hv, Dk, Dv), (W, C) = mixed.shape, state.shape, learned[0].shape
    Hk, n = (C - Hv * Dv) // (2 * Dk), triton.cdiv(T, BLOCK)
    R, DkP, DvP = Hv // Hk, *(max(16, triton.next_power_of_2(size)) for size in (Dk, Dv))
    precision = "tf32x3" if mixed.dtype == torch.float32 else "tf32"
    conv, decay, bias = learned
    qkv = state.new_empty(n * BLOCK, C)
    convolve_heads[(n * BLOCK // TOKENS, 2 * Hk + Hv)](
        mixed, window, conv, qkv, T, X, Hk, Dk**-0.5, R, Dk, Dv, max(DkP, DvP), W, TOKENS, num_warps=4
    )
    solved, scores, q, k, o = (state.new_empty(Hv, n, BLOCK, size) for size in (Dv + Dk, BLOCK, Dk, Dk, Dv))
    ends = state.new_empty(Hv, n)
    prepare_blocks[(n, Hv)](
        mixed, qkv, decay, bias, solved, scores, q, k, ends, T, X, Hk,
        R, Dk, Dv, DkP, DvP, BLOCK, precision, num_warps=8, num_stages=1,
    )  # fmt: skip
    recent = mixed[max(0, T - W + 1) :, :C]
    if T < W - 1:
        window[: W - 1 - T] = window[T:].clone()
    window[W - 1 - len(recent) :] = recent
    carry_columns[(Hv, triton.cdiv(Dv, COLUMNS))](
        solved, scores, q, k, ends, state, o, n, Dk, Dv, DkP, COLUMNS, BLOCK, precision,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    gate_heads[(triton.cdiv(T, TOKENS), Hv)](
        o, mixed, norm, out, T, n * BLOCK, X, Hk, eps, R, Dk, Dv, DvP, TOKENS, num_warps=4
    )
