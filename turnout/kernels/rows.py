"""The small steps between the matrix products of a decoder, each in one launch (Triton).

At one token such a step is but its launch. Composed by torch, a decode step of 12 layers of Qwen3-30B's
shape was 488 kernels in a graph and took 1.56 ms on an H200, 3.66 ms with 64 requests; with these it is 200,
0.95 ms and 2.68. A layer has four of them, residual sum and norm (twice), norm and rotation of heads, and the
store to the cache, beside the choice of experts (route.py). Each program computes a row, or a head of a row,
in float32 and rounds once, so a row's bits do not depend on its company.

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

from turnout.kernels.dependent import launches_early


@triton.jit
def norm_rows(
    x_ptr, delta_ptr, weight_ptr, sum_ptr, out_ptr, H, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[n] = RMS norm of x[n], or of sum[n] = x[n] + delta[n], times weight [H]."""
    row = tl.program_id(0).to(tl.int64) * H
    c = tl.arange(0, BLOCK)
    held = c < H
    weight = tl.load(weight_ptr + c, mask=held, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + row + c, mask=held, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta_ptr + row + c, mask=held, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row + c, rounded, mask=held)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + row + c, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=held)


@triton.jit
def rotate_heads(
    heads_ptr, weight_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, row_stride, eps, HQ, HK,
    D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """q [N, HQ, D] and k [N, HK, D]: the heads of each row, normed with weight [G, D], then rotated.

    heads: rows `row_stride` apart, of at least G * D values. cos, sin [N, D], sin with the rotation's sign.
    """
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    d = tl.arange(0, DP)
    across = (d + D // 2) % D
    held = d < D
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = heads_ptr + row * row_stride + g * D
    x = tl.load(head + d, mask=held, other=0.0).to(tl.float32)
    y = tl.load(head + across, mask=held, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        x *= scale * tl.load(weight_ptr + g * D + d, mask=held, other=0.0).to(tl.float32)
        y *= scale * tl.load(weight_ptr + g * D + across, mask=held, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * D + d, mask=held, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * D + d, mask=held, other=0.0).to(tl.float32)
    out = (x * cos + y * sin).to(q_ptr.dtype.element_ty)
    if g < HQ:
        tl.store(q_ptr + (row * HQ + g) * D + d, out, mask=held)
    else:
        tl.store(k_ptr + (row * HK + g - HQ) * D + d, out, mask=held)


@triton.jit
def store_rows(
    k_ptr, v_ptr, slots_ptr, cache_ptr, k_stride, v_stride, head_stride,
    D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """cache[h, slots[n]] = (k[n, h], v[n, h]); rows of k and v, and heads of the cache, are strides apart."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, DP)
    held = d < D
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    to = cache_ptr + h * head_stride + slot * (2 * D)
    tl.store(to + d, tl.load(k_ptr + row * k_stride + h * D + d, mask=held), mask=held)
    tl.store(to + D + d, tl.load(v_ptr + row * v_stride + h * D + d, mask=held), mask=held)


def norm(x_NH: Tensor, weight_H: Tensor, eps: float, delta_NH: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMS norm times weight), [N, H] in x's dtype; without delta the sum is x itself."""
    x_NH = x_NH.contiguous()
    N, H = x_NH.shape
    out_NH = torch.empty_like(x_NH)
    sum_NH = x_NH if delta_NH is None else torch.empty_like(x_NH)
    if N:
        block, early = triton.next_power_of_2(H), launches_early(x_NH.device)
        norm_rows[(N,)](
            x_NH, x_NH if delta_NH is None else delta_NH.contiguous(), weight_H, sum_NH, out_NH, H, eps,
            delta_NH is not None, block, early, num_warps=min(16, max(1, block // 512)), launch_pdl=early,
        )  # fmt: skip
    return sum_NH, out_NH


def rotate(
    heads_NX: Tensor,
    num_q: int,
    num_k: int,
    cos_ND: Tensor,
    sin_ND: Tensor,
    weight_GD: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Queries [N, num_q, D] and keys [N, num_k, D], normed with `weight` if given, then rotated.

    heads [N, X], contiguous: queries, keys and whatever else, D values each. cos, sin: contiguous.
    """
    N, D = cos_ND.shape
    q_NHD = heads_NX.new_empty(N, num_q, D)
    k_NHD = heads_NX.new_empty(N, num_k, D)
    if N:
        early = launches_early(heads_NX.device)
        rotate_heads[(N, num_q + num_k)](
            heads_NX, cos_ND if weight_GD is None else weight_GD, cos_ND, sin_ND, q_NHD, k_NHD,
            heads_NX.stride(0), eps, num_q, num_k,
            D, triton.next_power_of_2(D), weight_GD is not None, early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
    return q_NHD, k_NHD


def store(k_NHD: Tensor, v_NHD: Tensor, slots_N: Tensor, cache_HS2D: Tensor) -> None:
    """Put keys and values [N, Hkv, D] of a layer into slots of its cache; a row's heads lie side by side."""
    N, heads, D = k_NHD.shape
    if N:
        early = launches_early(k_NHD.device)
        store_rows[(N, heads)](
            k_NHD, v_NHD, slots_N, cache_HS2D, k_NHD.stride(0), v_NHD.stride(0), cache_HS2D.stride(0),
            D, triton.next_power_of_2(D), early, num_warps=1, launch_pdl=early,
        )  # fmt: skip
