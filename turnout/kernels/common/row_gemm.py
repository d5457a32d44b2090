"""The product of rowwise.py on CUDA, also in parts that whoever comes next adds up (Triton).

Legend: N rows, K inputs, M outputs, P parts, G groups of inputs that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.fp8_weights import scaled

OUTPUTS = 64  # of a tile: what one warp group's tensor-core instruction holds
COLUMNS = 64
WIDTHS = (16, 32, 64, 128)  # rows of a tile


@triton.jit(do_not_specialize=["N"])
def multiply_rows(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, N, M, K, piece, x_stride, w_stride,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[p] [N, M] = x[:, piece p] @ w[:, piece p].T + bias [M], pieces of `piece` inputs.

    WHOLE: `piece` is a multiple of COLUMNS. GROUP: w is e4m3, and has scales [G, M] for as many inputs each;
    0: it is of x's type.
    """
    m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    first = part * piece
    c = first + tl.arange(0, COLUMNS)
    w_at = w_ptr + m.to(tl.int64)[:, None] * w_stride + c[None, :]
    x_at = x_ptr + n.to(tl.int64)[None, :] * x_stride + c[:, None]
    m_held, n_held = m[:, None] < M, n[None, :] < N
    kind: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for k in range(0, piece, COLUMNS):
        if WHOLE:
            w = tl.load(w_at, mask=m_held, other=0.0)
            x = tl.load(x_at, mask=n_held, other=0.0)
        else:
            w = tl.load(w_at, mask=m_held & (k + c[None, :] < K), other=0.0)
            x = tl.load(x_at, mask=n_held & (k + c[:, None] < K), other=0.0)
        if GROUP:
            w = scaled(w, scale_ptr, m, first + k, M, K, M, GROUP, OUTPUTS, COLUMNS, kind)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w_at += COLUMNS
        x_at += COLUMNS
    if BIAS:
        acc += tl.load(bias_ptr + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + (part.to(tl.int64) * N + n[None, :]) * M + m[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=m_held & n_held)


def width(rows: int) -> int:
    """Rows of a tile, for so many."""
    return next((w for w in WIDTHS if rows <= w), WIDTHS[-1])


def linear(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None,
    rows: int | None = None,
    *,
    scale_GM: Tensor | None = None,
    group: int = 0,
) -> Tensor:
    """See rowwise.linear. rows: of a tile, instead of what suits N.

    scale: float32, contiguous, of a weight that is e4m3, for groups of as many columns.
    """
    y_NM = x_NK.new_empty(len(x_NK), len(weight_MK))
    return _multiply(x_NK, weight_MK, scale_GM, group, bias_M, y_NM[None], rows or width(len(x_NK)))[0]


def parts(x_NK: Tensor, weight_MK: Tensor, count: int, scale_GM: Tensor, group: int) -> Tensor:
    """float32 [count, N, M], whose sum over the first is x @ weight.T; of pieces of the inputs.

    A piece is a multiple of COLUMNS. weight, scale, group: as in `linear`.
    """
    shape = count, len(x_NK), len(weight_MK)
    y_PNM = torch.empty(shape, dtype=torch.float32, device=x_NK.device)
    return _multiply(x_NK, weight_MK, scale_GM, group, None, y_PNM, width(len(x_NK)))


def _multiply(
    x_NK: Tensor,
    weight_MK: Tensor,
    scale_GM: Tensor | None,
    group: int,
    bias_M: Tensor | None,
    y_PNM: Tensor,
    rows: int,
) -> Tensor:
    P, N, M = y_PNM.shape
    K = x_NK.shape[1]
    if N and M:
        piece, early = K // P, launches_early(x_NK.device)
        multiply_rows[(-(-M // OUTPUTS), -(-N // rows), P)](
            x_NK, weight_MK, weight_MK if scale_GM is None else scale_GM,
            weight_MK if bias_M is None else bias_M, y_PNM,
            N, M, K, piece, x_NK.stride(0), weight_MK.stride(0),
            bias_M is not None, piece % COLUMNS == 0, rows, OUTPUTS, COLUMNS, group, early,
            num_warps=4, num_stages=4, launch_pdl=early,
        )  # fmt: skip
    return y_PNM
