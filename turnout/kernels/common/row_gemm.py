"""The product of rowwise.py on CUDA (Triton).

Legend: N rows, K inputs, M outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 64  # of a tile: what one warp group's tensor-core instruction holds
COLUMNS = 64
WIDTHS = (16, 32, 64, 128)  # rows of a tile


@triton.jit(do_not_specialize=["N"])
def multiply_rows(
    x_ptr, w_ptr, bias_ptr, y_ptr, N, M, K, x_stride, w_stride,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """y [N, M] = x [N, K] @ w [M, K].T + bias [M]. WHOLE: K is a multiple of COLUMNS."""
    m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    w_at = w_ptr + m.to(tl.int64)[:, None] * w_stride + c[None, :]
    x_at = x_ptr + n.to(tl.int64)[None, :] * x_stride + c[:, None]
    m_held, n_held = m[:, None] < M, n[None, :] < N
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for k in range(0, K, COLUMNS):
        if WHOLE:
            w = tl.load(w_at, mask=m_held, other=0.0)
            x = tl.load(x_at, mask=n_held, other=0.0)
        else:
            w = tl.load(w_at, mask=m_held & (k + c[None, :] < K), other=0.0)
            x = tl.load(x_at, mask=n_held & (k + c[:, None] < K), other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w_at += COLUMNS
        x_at += COLUMNS
    if BIAS:
        acc += tl.load(bias_ptr + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + n.to(tl.int64)[None, :] * M + m[:, None]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=m_held & n_held)


def width(rows: int) -> int:
    """Rows of a tile, for so many."""
    return next((w for w in WIDTHS if rows <= w), WIDTHS[-1])


def linear(x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, rows: int | None = None) -> Tensor:
    """See rowwise.linear. rows: of a tile, instead of what suits N."""
    (N, K), M = x_NK.shape, len(weight_MK)
    y_NM = x_NK.new_empty(N, M)
    if N and M:
        rows = rows or width(N)
        multiply_rows[(-(-M // OUTPUTS), -(-N // rows))](
            x_NK, weight_MK, weight_MK if bias_M is None else bias_M, y_NM,
            N, M, K, x_NK.stride(0), weight_MK.stride(0),
            bias_M is not None, K % COLUMNS == 0, rows, OUTPUTS, COLUMNS,
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return y_NM
