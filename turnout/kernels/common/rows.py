"""The small steps between the matrix products of a decoder, each in one launch (Triton).

At one token such a step is but its launch. Composed by torch, a decode step of 12 layers of Qwen3-30B's shape
was 488 kernels in a graph and took 1.56 ms on an H200, 3.66 ms with 64 requests; with these it is 200, 0.95
ms and 2.68. A layer has three of them, residual sum and norm (twice), and norm and rotation of heads with
their store to the cache; the choice of experts is another (route.py). Each program computes a row, or a head
of a row, in float32 and rounds once, so a row's bits do not depend on the batch. What a product gave may come
in parts (split_gemm.py), which are added here, for one launch less.

Programs are launched before their predecessors have ended and wait for them before the first read
(programmatic dependent launch).

Legend: N rows, H hidden, G heads (queries, then keys), D head size, S slots of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.parts import count_parts, load_sum

FEW, MORE = 32, 256  # rows, up to which each head is a program, and a program has several heads of one row


@triton.jit(do_not_specialize=["part_rows", "rows"])
def norm_rows(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, H, part_rows, rows, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[n] = RMS norm of x[n], or of sum[n] = x[n] + delta[n], times weight [H].

    PARTS: delta [N, H] is the sum of as many, `part_rows` times H apart, whose rows are `rows` times H apart;
    0: there is none.
    """
    n = tl.program_id(0).to(tl.int64)
    row = n * H
    c = tl.arange(0, BLOCK)
    held = c < H
    weight = tl.load(weight_ptr + c, mask=held, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row + c, mask=held, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            at = delta_ptr + (part * part_rows + n * rows) * H
            x += tl.load(at + c, mask=held, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row + c, rounded, mask=held)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + row + c, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def load_halves(at, mask, HALF: tl.constexpr):
    """float32: both halves of heads, `at` the first."""
    return (
        tl.load(at, mask=mask, other=0.0).to(tl.float32),
        tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit
def turn(low, high, gains, cos, sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Both halves of heads, normed with `gains` if NORM, and rotated; sin has the rotation's sign."""
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        low *= scale * gains[0]
        high *= scale * gains[1]
    return low * cos[0] + high * sin[0], high * cos[1] + low * sin[1]


@triton.jit(do_not_specialize=["N"])
def rotate_heads(
    heads_ptr, weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, slots_ptr, cache_ptr,
    N, row_stride, head_stride, eps, HQ, HK,
    HALF: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
    STORE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [N, HQ, D] and k [N, HK, D]: the heads of each row, normed with weight [G, D], then rotated.

    heads: rows `row_stride` apart, of at least G * D values, the sum of PARTS that are N rows apart.
    cos, sin [N, D], sin with the rotation's sign. STORE: keys go to cache[h, slots[n], 0] instead, and the HK
    heads that follow, values, go as they are to cache[h, slots[n], 1]; heads of the cache are `head_stride`
    apart. A program has HEADS of ROWS rows, each head as two halves of HALF = D / 2 values, HP its power of
    two.
    """
    i = tl.arange(0, ROWS * HEADS)
    row = tl.program_id(0).to(tl.int64) * ROWS + i // HEADS
    g = tl.program_id(1) * HEADS + i % HEADS
    j = tl.arange(0, HP)[None, :]
    turned = g < HQ + HK
    held = ((row < N) & (g < HQ + (2 * HK if STORE else HK)))[:, None] & (j < HALF)
    known = held & turned[:, None]
    gains = (0.0, 0.0)
    if NORM:
        gains = load_halves(weight_ptr + g[:, None] * (2 * HALF) + j, known, HALF)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before: attention (decode.py) reads what is older than heads at once
    # All that is read is asked for before anything waits for a part of it.
    head = heads_ptr + row[:, None] * row_stride + g[:, None] * (2 * HALF) + j
    part_stride = N.to(tl.int64) * row_stride
    x = load_sum(head, part_stride, held, PARTS)
    y = load_sum(head + HALF, part_stride, held, PARTS)
    angle = row[:, None] * (2 * HALF) + j
    cos = load_halves(cos_ptr + angle, known, HALF)
    sin = load_halves(sin_ptr + angle, known, HALF)
    if STORE:
        slot = tl.load(slots_ptr + row, mask=row < N, other=0).to(tl.int64)
    low, high = turn(x, y, gains, cos, sin, eps, HALF, NORM)
    kind = q_ptr.dtype.element_ty
    first = tl.where(turned[:, None], low, x).to(kind)
    second = tl.where(turned[:, None], high, y).to(kind)
    to = q_ptr + (row * HQ + g)[:, None] * (2 * HALF)
    if STORE:
        h = ((g - HQ) % HK).to(tl.int64)
        stored = h * head_stride + (2 * slot + (g - HQ) // HK) * (2 * HALF)
        to = tl.where((g < HQ)[:, None], to, cache_ptr + stored[:, None])
    else:
        to = tl.where((g < HQ)[:, None], to, k_ptr + (row * HK + g - HQ)[:, None] * (2 * HALF))
    tl.store(to + j, first, mask=held)
    tl.store(to + HALF + j, second, mask=held)


@triton.jit(do_not_specialize=["N"])
def add_parts(
    parts_ptr, bias_ptr, out_ptr, N, M,
    PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N, M] = the sum of parts [PARTS, N, M], plus bias: [M] where BIAS is 1, [N, M] where it is 2."""
    size = N.to(tl.int64) * M
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + (at % M if BIAS == 1 else at), mask=held, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        x += tl.load(parts_ptr + part * size + at, mask=held, other=0.0)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["N"])
def gate_rows(
    x_ptr, token_ptr, out_ptr, N, M, X, token_stride, limit,
    PARTS: tl.constexpr, TOKEN_PARTS: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [N, M] = silu(x[:, :M]) * x[:, M:2M], of x [N, X], or of the sum of parts [PARTS, N, X].

    LIMITED: the first are at most `limit`, and the others as large either way. TOKEN_PARTS: of a number of
    each row, `token_stride` apart from the next row's, whose sigmoid scales the row; 0: there is none.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = c < M
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        at = x_ptr + (part * N.to(tl.int64) + row) * X + c
        gate += tl.load(at, mask=held, other=0.0).to(tl.float32)
        up += tl.load(at + M, mask=held, other=0.0).to(tl.float32)
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.clamp(up, -limit, limit)
    out = gate * tl.sigmoid(gate) * up
    if TOKEN_PARTS > 0:
        token = tl.load(token_ptr + row * token_stride).to(tl.float32)
        for part in tl.static_range(1, TOKEN_PARTS):
            token += tl.load(token_ptr + (part * N.to(tl.int64) + row) * token_stride).to(tl.float32)
        out *= 1.0 / (1.0 + tl.exp(-token))
    tl.store(out_ptr + row * M + c, out.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["N"])
def gate_values(
    x_ptr, gate_ptr, out_ptr, N, M, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [N, M] = x [N, M] * sigmoid(gate), of gate [N, M], or of the sum of parts [PARTS, N, M]."""
    size = N.to(tl.int64) * M
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < size
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        gate += tl.load(gate_ptr + part * size + at, mask=held, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=held, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def turn_angles(
    positions_ptr, frequencies_ptr, scaling_ptr, signs_ptr, cos_ptr, sin_ptr, D,
    DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """cos, sin [N, D] of positions [N] times frequencies [D], times scaling and signs [D]."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)
    frequency = tl.load(frequencies_ptr + d, mask=d < D, other=0.0)
    scaling = tl.load(scaling_ptr + d, mask=d < D, other=0.0)
    sign = tl.load(signs_ptr + d, mask=d < D, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    angle = tl.load(positions_ptr + n).to(tl.float32) * frequency
    tl.store(cos_ptr + n * D + d, (tl.cos(angle) * scaling).to(cos_ptr.dtype.element_ty), mask=d < D)
    tl.store(sin_ptr + n * D + d, (tl.sin(angle) * sign).to(sin_ptr.dtype.element_ty), mask=d < D)


def norm(x_NH: Tensor, weight_H: Tensor, eps: float, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMS norm times weight), [N, H] in x's dtype; without delta the sum is x itself.

    delta: [N, H], or [P, N, H], whose sum over P is meant.
    """
    x_NH = x_NH.contiguous()
    N, H = x_NH.shape
    rows = part_rows = 0
    if delta is not None:
        if delta.stride(-1) != 1 or any(stride % H for stride in delta.stride()[:-1]):
            delta = delta.contiguous()
        rows, part_rows = delta.stride(-2) // H, delta.stride(0) // H
    out_NH = torch.empty_like(x_NH)
    sum_NH = x_NH if delta is None else torch.empty_like(x_NH)
    parts = 0 if delta is None else count_parts(delta)
    if N:
        block, early = triton.next_power_of_2(H), launches_early(x_NH.device)
        warps = min(16, max(1, block // (128 if parts > 1 else 512)))
        norm_rows[(N,)](
            x_NH, x_NH if delta is None else delta, weight_H, sum_NH, out_NH, H, part_rows, rows, eps,
            parts, block, early, num_warps=warps, launch_pdl=early,
        )  # fmt: skip
    return sum_NH, out_NH


def rotate(
    heads: Tensor,
    num_q: int,
    num_k: int,
    cos_ND: Tensor,
    sin_ND: Tensor,
    weight_GD: Tensor | None,
    eps: float,
    *,
    store: tuple[Tensor, Tensor] | None = None,
    q_NHD: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Queries [N, num_q, D] and keys [N, num_k, D], normed with `weight` if given, then rotated.

    heads: [N, X], contiguous, queries, keys and whatever else, D values each; or [P, N, X], whose sum over P
    is meant. cos, sin: contiguous. store: a layer's cache [Hkv, S, 2, D] and the slots [N] of it for keys,
    and for the values that follow them in a row; there are no keys to return then. q: contiguous, to be
    filled and returned.
    """
    N, D = cos_ND.shape
    dtype = cos_ND.dtype
    if q_NHD is None:
        q_NHD = torch.empty(N, num_q, D, dtype=dtype, device=cos_ND.device)
    k_NHD = None if store else torch.empty(N, num_k, D, dtype=dtype, device=cos_ND.device)
    if N:
        early = launches_early(heads.device)
        cache, slots = store or (q_NHD, q_NHD)
        total, block = num_q + num_k + (num_k if store else 0), 1 if N <= FEW else 8
        rows = 1 if N <= MORE else 2
        rotate_heads[(triton.cdiv(N, rows), triton.cdiv(total, block))](
            heads, cos_ND if weight_GD is None else weight_GD, cos_ND, sin_ND,
            q_NHD, q_NHD if k_NHD is None else k_NHD, slots, cache,
            N, heads.stride(-2), cache.stride(0), eps, num_q, num_k,
            D // 2, triton.next_power_of_2(D // 2), block, rows, weight_GD is not None, store is not None,
            count_parts(heads), early, num_warps=1 if block == 1 else 4, launch_pdl=early,
        )  # fmt: skip
    return q_NHD, k_NHD


def add(parts_PNM: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[N, M] in `dtype`: the sum of float32 parts, and of a bias [M] or [N, M]."""
    P, N, M = parts_PNM.shape
    out_NM = torch.empty(N, M, dtype=dtype, device=parts_PNM.device)
    if N:
        block, early = 512, launches_early(parts_PNM.device)
        add_parts[(triton.cdiv(N * M, block),)](
            parts_PNM, parts_PNM if bias is None else bias.contiguous(), out_NM, N, M,
            P, 0 if bias is None else bias.dim(), block, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out_NM


def gate(
    x: Tensor, dtype: torch.dtype, limit: float | None = None, M: int = 0, token: Tensor | None = None
) -> Tensor:
    """[N, M] in `dtype` of [N, X], or of [P, N, X], whose sum over P is meant; see `gate_rows`.

    M: half of X if 0. token: [N, 1] or parts [P, N, 1], whose sigmoid scales a row; it may be a column of x.
    """
    N, X = x.shape[-2:]
    M = M or X // 2
    out_NM = torch.empty(N, M, dtype=dtype, device=x.device)
    if N:
        block, early = min(1024, triton.next_power_of_2(M)), launches_early(x.device)
        x = x.contiguous()
        gate_rows[(N, triton.cdiv(M, block))](
            x, x if token is None else token, out_NM, N, M, X, 0 if token is None else token.stride(-2),
            float(limit or 0), count_parts(x), 0 if token is None else count_parts(token), limit is not None,
            block, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out_NM


def gated(x_NM: Tensor, gate: Tensor) -> Tensor:
    """[N, M] in x's dtype: x times the sigmoid of [N, M], or of [P, N, M], whose sum over P is meant."""
    N, M = x_NM.shape
    out_NM = torch.empty(N, M, dtype=x_NM.dtype, device=x_NM.device)
    if N:
        block, early = 512, launches_early(x_NM.device)
        gate_values[(triton.cdiv(N * M, block),)](
            x_NM.contiguous(), gate.contiguous(), out_NM, N, M, count_parts(gate), block, early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out_NM


def angles(
    positions_N: Tensor, frequencies_D: Tensor, scaling_D: Tensor, signs_D: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [N, D] of positions, int64, in `dtype`; see `turn_angles`. The others: float32."""
    N, D = len(positions_N), len(frequencies_D)
    cos_ND, sin_ND = (torch.empty(N, D, dtype=dtype, device=positions_N.device) for _ in range(2))
    if N:
        early = launches_early(positions_N.device)
        turn_angles[(N,)](
            positions_N.contiguous(), frequencies_D, scaling_D, signs_D, cos_ND, sin_ND, D,
            triton.next_power_of_2(D), early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return cos_ND, sin_ND
