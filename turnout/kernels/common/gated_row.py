"""One row's gated activation and product by a matrix, and the sum with another row, in one launch (Triton).

The end of a shared expert. With one token a step is as long as its chain of launches, and apart the
activation, the product and the sum with what routed experts gave are three. Every program of the product
(split_gemm.py) loads its weights before it waits, then makes its piece of the activation itself: 16 KB of
parts next to 32 KB of weights.

Legend: K inputs, M outputs, P parts, X of the gated row: K of the gate, K of what it gates, and the rest.
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
from turnout.kernels.common.split_gemm import OUTPUTS, pieces


@triton.jit
def multiply_gated_row(
    x_ptr, token_ptr, w_ptr, scale_ptr, more_ptr, y_ptr, M, K, X, token_stride, w_stride,
    PARTS: tl.constexpr, TOKEN_PARTS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[p] float32 [M] = h[piece p] @ w[:, piece p].T, pieces of COLUMNS inputs; y[0] plus more [M].

    h = silu(x[:K]) * x[K:2K] * sigmoid(token), in the type of `more`, of x [X] and a number that are sums of
    PARTS and TOKEN_PARTS; parts of the latter are `token_stride` apart. GROUP: as in `multiply_part`.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    m = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    c = part * COLUMNS + tl.arange(0, COLUMNS)
    kind: tl.constexpr = more_ptr.dtype.element_ty
    w = tl.load(w_ptr + m.to(tl.int64)[:, None] * w_stride + c[None, :], mask=m[:, None] < M, other=0.0)
    if GROUP:
        w = scaled(w, scale_ptr, m, part * COLUMNS, M, K, M, GROUP, OUTPUTS, COLUMNS, kind)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(x_ptr + c).to(tl.float32)
    up = tl.load(x_ptr + K + c).to(tl.float32)
    token = tl.load(token_ptr).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        gate += tl.load(x_ptr + i * X + c).to(tl.float32)
        up += tl.load(x_ptr + i * X + K + c).to(tl.float32)
    for i in tl.static_range(1, TOKEN_PARTS):
        token += tl.load(token_ptr + i * token_stride).to(tl.float32)
    h = gate * tl.sigmoid(gate) * up / (1.0 + tl.exp(-token))
    y = tl.sum(w.to(tl.float32) * h.to(kind).to(tl.float32)[None, :], 1)
    y += tl.load(more_ptr + m, mask=(m < M) & (part == 0), other=0.0).to(tl.float32)
    tl.store(y_ptr + part * M + m, y, mask=m < M)


def width(inner: int, outputs: int, dtype: torch.dtype) -> int:
    """Inputs of a piece of such a product; 0 where separate kernels do better."""
    columns, steps = pieces(1, outputs, inner)
    fits = steps == 1 and inner % columns == 0 and dtype in (torch.bfloat16, torch.float16)
    return columns if fits else 0


def gated_parts(
    x: Tensor,
    token: Tensor,
    weight_MK: Tensor,
    more_1M: Tensor,
    *,
    scale_GM: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """float32 [P, 1, M], whose sum over P is `more` and the product of the gated row; `width` is not 0.

    x: [1, X] or parts [P, 1, X], contiguous; token: [1, 1] or parts [P, 1, 1], which may be a column of x.
    weight, scale, group: as in `split_gemm.parts`.
    """
    M, K = weight_MK.shape
    columns, early = width(K, M, more_1M.dtype), launches_early(x.device)
    y_P1M = torch.empty(K // columns, 1, M, dtype=torch.float32, device=x.device)
    multiply_gated_row[(-(-M // OUTPUTS), len(y_P1M))](
        x, token, weight_MK, weight_MK if scale_GM is None else scale_GM, more_1M.contiguous(), y_P1M,
        M, K, x.shape[-1], token.stride(0), weight_MK.stride(0),
        count_parts(x), count_parts(token), OUTPUTS, columns, group, early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return y_P1M
