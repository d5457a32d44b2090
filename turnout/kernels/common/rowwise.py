"""Products whose rows depend on nothing but themselves: the same bits in any batch.

GEMM libraries choose tiles and the order of summation by the number of rows, so a row's last bits vary with
how many others there are. Here they do not:

* On a CPU every row is a call of its own, of one shape. Other work of a model has the same trouble there
  (vector loops end in scalar ones, which round otherwise), so whoever wants a whole forward invariant gives
  it one token at a time; this is for the products that then still see several rows.
* On CUDA one kernel, in Triton. As in gemm.py weights are the first operand of the tensor cores and
  rows the second, so that a tile's width follows their number, while each row's products are added in the
  same order, 64 columns at a time into one accumulator, whatever the width. No split of the inner dimension.

Legend: N rows, K inputs, M outputs, P parts.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear(Protocol):
    """torch.nn.functional.linear, or what computes the same."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor: ...


def linear(x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """[N, M] in x's dtype, which is the weight's and the bias's; the inner dimensions are contiguous."""
    if x_NK.device.type == "cuda" and find_spec("triton"):
        from turnout.kernels.common.row_gemm import linear as fused

        return fused(x_NK, weight_MK, bias_M)
    return one_by_one(lambda row: F.linear(row, weight_MK, bias_M), x_NK)


def wide_linear(x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """float32 [N, M] of 16-bit rows and weights, on CUDA: sums of exact products."""
    if bias_M is not None:
        raise ValueError("no bias is added here")
    if not len(x_NK):
        return x_NK.new_empty(0, len(weight_MK), dtype=torch.float32)
    return torch.mm(x_NK, weight_MK.T, out_dtype=torch.float32)


def product(linear: Linear, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None) -> Tensor:
    """[N, M] of `linear`, x in the weight's dtype; or, of few rows on a GPU where `linear` is a library's,
    float32 parts [P, N, M] for whoever comes next to add up (split_gemm.py, dense_rows.py)."""
    if linear in (F.linear, wide_linear) and x_NK.device.type == "cuda" and find_spec("triton"):
        from turnout.kernels.common import split_gemm
        from turnout.kernels.hopper import dense_rows

        some = bias_M is None and dense_rows.runs(x_NK, weight_MK)
        wide = some and len(weight_MK) > split_gemm.NARROW
        parts_PNM = None if wide else split_gemm.parts(x_NK, weight_MK, bias_M)
        if parts_PNM is not None:
            return parts_PNM
        if some:
            return dense_rows.parts(x_NK, weight_MK)
    return linear(x_NK.to(weight_MK.dtype), weight_MK, bias_M)


def one_by_one(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """`function` of one row of each at a time, put together; rows [N, ...] are copied, hence aligned alike.

    Without rows it is called once, for the shape of nothing.
    """
    singles = list(zip(*(x.split(1) for x in rows), strict=True)) if len(rows[0]) else [rows]
    return torch.cat([function(*(x.clone() for x in single)) for single in singles])
