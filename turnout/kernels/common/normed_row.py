"""One row's residual sum, norm and product by a matrix, in one launch (Triton).

With one token a decode step is as long as its chain of launches. Every program of the product (split_gemm.py)
loads its weights before it waits for what makes the row, then reads the whole row for its norm, 8 KB, for
which a launch of its own takes longer. With more rows they would read too much.

Legend: H hidden (the product's inputs), M outputs, P parts, G groups of inputs that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.fp8_weights import scaled
from turnout.kernels.common.parts import count_parts
from turnout.kernels.common.split_gemm import OUTPUTS, ROW_OUTPUTS, ROW_WARPS, pieces, whole_rows


@triton.jit
def multiply_normed_row(
    x_ptr, delta_ptr, gain_ptr, w_ptr, scale_ptr, sum_ptr, normed_ptr, y_ptr, M, H, eps, w_stride,
    PARTS: tl.constexpr, HP: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[p] float32 [M] = normed[piece p] @ w[:, piece p].T, pieces of COLUMNS inputs.

    normed [H]: the RMS norm of x [H], or of sum = x + delta, times gain [H]. delta: the sum of PARTS [H]; 0:
    there is none. sum and normed are written once. HP: H's power of two. GROUP: as in `multiply_part`.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    c = part * COLUMNS + tl.arange(0, COLUMNS)
    h = tl.arange(0, HP)
    held = h < H
    kind: tl.constexpr = x_ptr.dtype.element_ty
    w_at = w_ptr + m.to(tl.int64)[:, None] * w_stride + c[None, :]
    w = tl.load(w_at, mask=m[:, None] < M, other=0.0)
    if GROUP:
        w = scaled(w, scale_ptr, m, part * COLUMNS, M, H, M, GROUP, OUTPUTS, COLUMNS, kind)
    gain = tl.load(gain_ptr + c).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    whole = tl.load(x_ptr + h, mask=held, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + c).to(tl.float32)
    for i in tl.static_range(PARTS):
        whole += tl.load(delta_ptr + i * H + h, mask=held, other=0.0).to(tl.float32)
        x += tl.load(delta_ptr + i * H + c).to(tl.float32)
    whole = whole.to(kind).to(tl.float32)
    rounded = x.to(kind)
    scale = tl.rsqrt(tl.sum(whole * whole, 0) / H + eps)
    normed = (rounded.to(tl.float32) * scale * gain).to(kind)
    first = tl.full([COLUMNS], 0, tl.int32) + tile == 0
    if PARTS > 0:
        tl.store(sum_ptr + c, rounded, mask=first)
    tl.store(normed_ptr + c, normed, mask=first)
    y = tl.sum(w.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    tl.store(y_ptr + part * M + m, y, mask=m < M)


@triton.jit
def multiply_whole_row(
    x_ptr, delta_ptr, gain_ptr, w_ptr, sum_ptr, normed_ptr, y_ptr, eps, w_stride,
    PARTS: tl.constexpr, H: tl.constexpr, OUTPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y float32 [M] = normed @ w.T: as `multiply_normed_row`, a program having OUTPUTS whole rows of w."""
    tile = tl.program_id(0)
    m = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    c = tl.arange(0, H)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    w = tl.load(w_ptr + m[:, None] * w_stride + c[None, :])
    gain = tl.load(gain_ptr + c).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(x_ptr + c).to(tl.float32)
    for i in tl.static_range(PARTS):
        x += tl.load(delta_ptr + i * H + c).to(tl.float32)
    rounded = x.to(kind)
    x = rounded.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * gain).to(kind)
    y = tl.sum(w.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    tl.store(y_ptr + m, y)
    if tile == 0:
        if PARTS > 0:
            tl.store(sum_ptr + c, rounded)
        tl.store(normed_ptr + c, normed)


def normed_parts(
    x_1H: Tensor,
    delta: Tensor | None,
    gain_H: Tensor,
    eps: float,
    weight_MH: Tensor,
    *,
    scale_GM: Tensor | None = None,
    group: int = 0,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(x + delta, its RMS norm times gain, parts of the latter's product by the weight), or None.

    [1, H], [1, H] and float32 [P, 1, M], whose sum over P is meant; None where separate kernels do better.
    delta: [1, H], or parts of it [P, 1, H]. weight, scale, group: as in `split_gemm.parts`.
    """
    (N, H), M = x_1H.shape, len(weight_MH)
    width, steps = pieces(N, M, H)
    if N != 1 or steps != 1 or H % width or x_1H.dtype not in (torch.bfloat16, torch.float16):
        return None
    x_1H = x_1H.contiguous()
    total_1H = x_1H if delta is None else torch.empty_like(x_1H)
    normed_1H = torch.empty_like(x_1H)
    parts = 0 if delta is None else count_parts(delta)
    early = launches_early(x_1H.device)
    if not group and whole_rows(M, H):
        y_11M = torch.empty(1, 1, M, dtype=torch.float32, device=x_1H.device)
        multiply_whole_row[(M // ROW_OUTPUTS,)](
            x_1H, x_1H if delta is None else delta.contiguous(), gain_H, weight_MH, total_1H, normed_1H,
            y_11M, eps, weight_MH.stride(0), parts, H, ROW_OUTPUTS, early, num_warps=ROW_WARPS,
            launch_pdl=early,
        )  # fmt: skip
        return total_1H, normed_1H, y_11M
    y_P1M = torch.empty(H // width, 1, M, dtype=torch.float32, device=x_1H.device)
    multiply_normed_row[(-(-M // OUTPUTS), len(y_P1M))](
        x_1H, x_1H if delta is None else delta.contiguous(), gain_H, weight_MH,
        weight_MH if scale_GM is None else scale_GM, total_1H, normed_1H, y_P1M,
        M, H, eps, weight_MH.stride(0),
        parts, triton.next_power_of_2(H), OUTPUTS, width, group, early,
        num_warps=8 if parts > 1 else 4, launch_pdl=early,
    )  # fmt: skip
    return total_1H, normed_1H, y_P1M
