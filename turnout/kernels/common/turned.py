"""Heads whose end is rotated in pairs of neighbours, normed before it or not, in one launch (Triton).

Composed by torch a rotation is eight launches, and compressed attention has four of them in a layer. What its
first product gives is also divided here. As in rows.py, products may come in parts, which are added up.

Legend: N rows, G heads, D head size, DP a power of two above it, R its rotated end, L rank of queries, X of
what entries are made of, I weights of an index.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.parts import count_parts, load_sum

HEADS = 4  # of a program
COPIED = 512  # columns of a program that divides


@triton.jit
def turned_rows(
    rows, held, weight_ptr, cos_ptr, sin_ptr, part_stride, D, R, eps,
    DP: tl.constexpr, NORM: tl.constexpr, BACK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """float32 [.., DP] of what begins at rows [.., 1], normed with weight [D], the last R rotated by cos and
    sin [R] of halves."""
    d = tl.arange(0, DP)
    turned = (d >= D - R) & (d < D)
    other = tl.where(turned, d ^ 1, d)
    x = load_sum(rows + d[None, :], part_stride, held, PARTS)
    y = load_sum(rows + other[None, :], part_stride, held, PARTS)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= scale * tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        y *= scale * tl.load(weight_ptr + other, mask=d < D, other=0.0).to(tl.float32)[None, :]
    pair = (d - (D - R)) // 2
    cos = tl.load(cos_ptr + pair, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + R // 2 + pair, mask=turned, other=0.0).to(tl.float32)
    sin = tl.where((d % 2 == 0) != BACK, -sin, sin)
    return x * cos[None, :] + y * sin[None, :]


@triton.jit(do_not_specialize=["part_stride"])
def turn_heads(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, row_stride, part_stride, G, D, R, eps,
    DP: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, BACK: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [N, G, D] of x, rows `row_stride` apart, the sum of PARTS that are `part_stride` apart, normed with
    weight [D]; cos, sin [N, R] of halves. BACK: by the negative angle."""
    n = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DP)
    held = (g < G)[:, None] & (d < D)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    heads = x_ptr + n * row_stride + g[:, None] * D
    out = turned_rows(
        heads, held, weight_ptr, cos_ptr + n * R, sin_ptr + n * R, part_stride, D, R, eps, DP, NORM, BACK,
        PARTS,
    )  # fmt: skip
    tl.store(out_ptr + (n * G + g[:, None]) * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["part_stride"])
def divide_rows(
    x_ptr, query_gain_ptr, kv_gain_ptr, cos_ptr, sin_ptr, q_ptr, kv_ptr, raw_ptr, weights_ptr,
    row_stride, part_stride, L, D, R, X, I, scale, eps,
    LP: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of x, [L + D + X + I] in each row: q [N, L], normed with a gain; kv [N, D], normed with another and
    rotated as by `turn_heads`; raw [N, X]; float32 weights [N, I], which are scaled."""
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    x_ptr += n * row_stride
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if block == 0:
        c = tl.arange(0, LP)
        x = load_sum(x_ptr + c, part_stride, c < L, PARTS)
        gain = tl.load(query_gain_ptr + c, mask=c < L, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(x * x, 0) / L + eps) * gain
        tl.store(q_ptr + n * L + c, x.to(q_ptr.dtype.element_ty), mask=c < L)
    elif block == 1:
        d = tl.arange(0, DP)[None, :]
        row = x_ptr + L + tl.zeros([1, 1], tl.int32)
        out = turned_rows(
            row, d < D, kv_gain_ptr, cos_ptr + n * R, sin_ptr + n * R, part_stride, D, R, eps, DP, True,
            False, PARTS,
        )  # fmt: skip
        tl.store(kv_ptr + n * D + d, out.to(kv_ptr.dtype.element_ty), mask=d < D)
    else:
        c = (block - 2) * BLOCK + tl.arange(0, BLOCK)
        x = load_sum(x_ptr + L + D + c, part_stride, c < X + I, PARTS)
        tl.store(raw_ptr + n * X + c, x.to(raw_ptr.dtype.element_ty), mask=c < X)
        tl.store(weights_ptr + n * I + c - X, x * scale, mask=(c >= X) & (c < X + I))


def turn(
    x: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    *,
    weight_D: Tensor | None = None,
    eps: float = 0.0,
    back: bool = False,
) -> Tensor:
    """[N, G, D] in x's dtype, or for parts in that of cos and sin.

    x: heads side by side, rows anyhow; or parts [P, N, G, D], whose sum over P is meant. cos, sin: of halves,
    as `RotaryEmbedding` gives them; D and R are even. weight: of an RMS norm before it.
    """
    N, G, D = x.shape[-3:]
    if x.stride()[-2:] != (D, 1):
        x = x.contiguous()
    out_NGD = (x if x.dim() == 3 else cos_NR).new_empty(N, G, D)
    early, heads = launches_early(x.device), min(HEADS, triton.next_power_of_2(G))
    if N:
        turn_heads[(N, triton.cdiv(G, heads))](
            x, x if weight_D is None else weight_D, cos_NR.contiguous(), sin_NR.contiguous(), out_NGD,
            x.stride(-3), x.stride(0), G, D, cos_NR.shape[-1], eps,
            triton.next_power_of_2(D), heads, weight_D is not None, back, len(x) if x.dim() == 4 else 1,
            early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out_NGD


def divide(
    x: Tensor,
    sizes: Sequence[int],
    query_gain_L: Tensor,
    kv_gain_D: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    *,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[N, L], [N, D] and [N, X] in the dtype of cos and sin, and float32 [N, I]; see `divide_rows`.

    x: [N, L + D + X + I], rows anyhow, or parts as of `turn`. sizes: L, D, X and I. cos, sin: as of `turn`.
    """
    N, (L, D, X, I) = x.shape[-2], sizes
    q_NL, kv_ND, raw_NX = (cos_NR.new_empty(N, size) for size in (L, D, X))
    weights_NI = torch.empty(N, I, dtype=torch.float32, device=x.device)
    early = launches_early(x.device)
    if N:
        divide_rows[(N, 2 + triton.cdiv(X + I, COPIED))](
            x, query_gain_L, kv_gain_D, cos_NR.contiguous(), sin_NR.contiguous(), q_NL, kv_ND, raw_NX,
            weights_NI, x.stride(-2), x.stride(0), L, D, cos_NR.shape[-1], X, I, scale, eps,
            triton.next_power_of_2(L), triton.next_power_of_2(D), COPIED, count_parts(x),
            early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return q_NL, kv_ND, raw_NX, weights_NI
