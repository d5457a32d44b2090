"""Heads whose end is rotated in pairs of neighbours, normed before it or not, in one launch (Triton).

Composed by torch a rotation is eight launches, and compressed attention has four of them in a layer.

Legend: N rows, G heads, D head size, DP a power of two above it, R its rotated end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early

HEADS = 4  # of a program


@triton.jit
def turn_heads(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, row_stride, G, D, R, eps,
    DP: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, BACK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N, G, D] of x, rows `row_stride` apart, normed with weight [D]; cos, sin [N, R] of halves. BACK:
    by the negative angle."""
    n = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DP)
    held = (g < G)[:, None] & (d < D)[None, :]
    turned = (d >= D - R) & (d < D)
    other = tl.where(turned, d ^ 1, d)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = x_ptr + n * row_stride + g[:, None] * D
    x = tl.load(head + d[None, :], mask=held, other=0.0).to(tl.float32)
    y = tl.load(head + other[None, :], mask=held, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x *= scale * tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        y *= scale * tl.load(weight_ptr + other, mask=d < D, other=0.0).to(tl.float32)[None, :]
    pair = (d - (D - R)) // 2
    cos = tl.load(cos_ptr + n * R + pair, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + n * R + R // 2 + pair, mask=turned, other=0.0).to(tl.float32)
    sin = tl.where((d % 2 == 0) != BACK, -sin, sin)
    out = x * cos[None, :] + y * sin[None, :]
    tl.store(out_ptr + (n * G + g[:, None]) * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=held)


def turn(
    x_NGD: Tensor,
    cos_NR: Tensor,
    sin_NR: Tensor,
    *,
    weight_D: Tensor | None = None,
    eps: float = 0.0,
    back: bool = False,
) -> Tensor:
    """[N, G, D] in x's dtype. x: heads side by side, rows anyhow. cos, sin: of halves, as `RotaryEmbedding`
    gives them; D and R are even. weight: of an RMS norm before it."""
    N, G, D = x_NGD.shape
    if x_NGD.stride()[1:] != (D, 1):
        x_NGD = x_NGD.contiguous()
    out_NGD = x_NGD.new_empty(N, G, D)
    early, heads = launches_early(x_NGD.device), min(HEADS, triton.next_power_of_2(G))
    if N:
        turn_heads[(N, triton.cdiv(G, heads))](
            x_NGD, x_NGD if weight_D is None else weight_D, cos_NR.contiguous(), sin_NR.contiguous(), out_NGD,
            x_NGD.stride(0), G, D, cos_NR.shape[-1], eps,
            triton.next_power_of_2(D), heads, weight_D is not None, back, early,
            num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out_NGD
