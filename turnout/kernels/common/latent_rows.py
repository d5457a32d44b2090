"""The small steps of latent attention between its products, each in one launch (Triton).

As in rows.py: products may come in parts, which are added up here; each program computes a row, or some heads
of one, in float32 and rounds once, and is launched before its predecessor has ended.

Legend: N rows, Lq/Lc ranks of queries and of the latent vector, H heads, D head size, R of a head's last
values, which are rotated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.parts import count_parts, load_sum

HEADS = 8  # of a program


@triton.jit
def _normed(at, gain_ptr, part_stride, size, eps, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """(float32 [BLOCK], which are held): the RMS norm of `size` values times gain."""
    c = tl.arange(0, BLOCK)
    held = c < size
    x = load_sum(at + c, part_stride, held, PARTS)
    gain = tl.load(gain_ptr + c, mask=held, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * gain, held


@triton.jit
def _rotated(at, cos_at, sin_at, part_stride, R: tl.constexpr, RP: tl.constexpr, PARTS: tl.constexpr):
    """(float32 [RP], which are held): R values rotated."""
    d = tl.arange(0, RP)
    held = d < R
    x = load_sum(at + d, part_stride, held, PARTS)
    across = load_sum(at + (d + R // 2) % R, part_stride, held, PARTS)
    cos = tl.load(cos_at + d, mask=held, other=0.0).to(tl.float32)
    sin = tl.load(sin_at + d, mask=held, other=0.0).to(tl.float32)
    return x * cos + across * sin, held


@triton.jit(do_not_specialize=["part_stride"])
def norm_latents(
    x_ptr, query_gain_ptr, gain_ptr, cos_ptr, sin_ptr, query_ptr, latent_ptr,
    row_stride, part_stride, first, Lq, eps,
    LQP: tl.constexpr, LC: tl.constexpr, LCP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """latent [N, LC + R]: of each row of x the norm of LC values from `first` on times gain [LC], and the R
    after them rotated by cos and sin [N, R]; query [N, Lq]: the norm of its first Lq times query_gain [Lq].

    Programs of second number 0 make latent, those of 1 query. x: rows `row_stride` apart, the sum of PARTS.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x_at = x_ptr + row * row_stride
    if tl.program_id(1) == 0:
        to = latent_ptr + row * (LC + R)
        at = x_at + first
        kept, kept_held = _normed(at, gain_ptr, part_stride, LC, eps, LCP, PARTS)
        tl.store(to + tl.arange(0, LCP), kept.to(latent_ptr.dtype.element_ty), mask=kept_held)
        key, key_held = _rotated(at + LC, cos_ptr + row * R, sin_ptr + row * R, part_stride, R, RP, PARTS)
        tl.store(to + LC + tl.arange(0, RP), key.to(latent_ptr.dtype.element_ty), mask=key_held)
    else:
        query, query_held = _normed(x_at, query_gain_ptr, part_stride, Lq, eps, LQP, PARTS)
        query_at = query_ptr + row * Lq + tl.arange(0, LQP)
        tl.store(query_at, query.to(query_ptr.dtype.element_ty), mask=query_held)


@triton.jit(do_not_specialize=["part_stride"])
def rotate_tails(
    x_ptr, cos_ptr, sin_ptr, out_ptr, row_stride, part_stride, H,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [N, H, D]: the heads that rows of x begin with, their last R values rotated by cos, sin [N, R]."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DP)
    held = (h < H)[:, None] & (d < D)[None, :]
    turned = held & (d >= D - R)[None, :]
    r = d - (D - R)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = x_ptr + row * row_stride + h[:, None] * D
    x = load_sum(head + d[None, :], part_stride, held, PARTS)
    across = load_sum(head + D - R + ((r + R // 2) % R)[None, :], part_stride, turned, PARTS)
    own = (d >= D - R) & (d < D)
    cos = tl.load(cos_ptr + row * R + r, mask=own, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + row * R + r, mask=own, other=0.0).to(tl.float32)[None, :]
    out = (x * cos + across * sin).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * H + h)[:, None] * D + d[None, :], out, mask=held)


def latents(
    x: Tensor, query_gain: Tensor | None, gain: Tensor, cos_NR: Tensor, sin_NR: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """(latent [N, Lc + R], query [N, Lq] if there is a gain of it); see `norm_latents`.

    x: [N, X], or [P, N, X], whose sum over P is meant; its last Lc + R columns become the latent. The others
    too: contiguous.
    """
    (N, X), Lc, R = x.shape[-2:], len(gain), cos_NR.shape[-1]
    Lq = 0 if query_gain is None else len(query_gain)
    latent = torch.empty(N, Lc + R, dtype=cos_NR.dtype, device=x.device)
    query = None if query_gain is None else torch.empty(N, Lq, dtype=cos_NR.dtype, device=x.device)
    if N:
        early = launches_early(x.device)
        norm_latents[(N, 1 if query is None else 2)](
            x, gain if query_gain is None else query_gain, gain, cos_NR, sin_NR,
            latent if query is None else query, latent, X, N * X, X - Lc - R, max(1, Lq), eps,
            triton.next_power_of_2(max(1, Lq)), Lc, triton.next_power_of_2(Lc), R,
            triton.next_power_of_2(R), count_parts(x), early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return latent, query


def rotated(x: Tensor, num_heads: int, head_dim: int, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    """[N, H, D]; see `rotate_tails`. x: [N, X], or parts [P, N, X] of it, contiguous."""
    (N, X), R = x.shape[-2:], cos_NR.shape[-1]
    out = torch.empty(N, num_heads, head_dim, dtype=cos_NR.dtype, device=x.device)
    if N:
        early = launches_early(x.device)
        rotate_tails[(N, triton.cdiv(num_heads, HEADS))](
            x, cos_NR, sin_NR, out, X, N * X, num_heads,
            head_dim, triton.next_power_of_2(head_dim), R, HEADS, count_parts(x), early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out
