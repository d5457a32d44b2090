"""Weights of dense layers, plain or kept in FP8, and what multiplies by them.

On GPUs that decode e4m3 a matrix that a checkpoint stores in FP8 stays so, at half the bytes of bfloat16
(kernels/common/fp8_weights.py); elsewhere it is decoded when it is loaded, to the same values.

Legend: N rows, K inputs, M outputs, P parts, G groups of inputs that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.formats.fp8 import BLOCK
from turnout.formats.fp8 import DTYPE as E4M3
from turnout.formats.packed import PackedTensor
from turnout.kernels.common import rowwise
from turnout.models.shares import Share
from turnout.packages import runs_triton
from turnout.parallel.groups import Group

SOME = 256  # rows, above which a decoded copy for the library's product costs little
MOST_DECODED = 2**25  # weights decoded at a time, in pieces of HEIGHT outputs, which the library's kernels
HEIGHT = 256  # need to begin at an even address
MIN_GROUP_COLUMNS = 16  # under one scale: a share cut finer is decoded


@dataclass(frozen=True)
class Fp8Weight:
    """[M, K]. data: e4m3; scale: float32, of `group` columns of a row; both contiguous."""

    data_MK: Tensor
    scale_GM: Tensor
    group: int

    @classmethod
    def of(cls, packed: PackedTensor, rows: Share, columns: Share) -> Fp8Weight | None:
        """A rank's share of a matrix in FP8; None where groups of columns come too small."""
        group = math.gcd(columns.start, BLOCK)
        if packed.scale is None or group < MIN_GROUP_COLUMNS:
            return None
        these = slice(rows.start, rows.start + rows.size)
        scale_MG = packed.scale.repeat_interleave(packed.block_rows, 0)[these]
        scale_MG = scale_MG.repeat_interleave(BLOCK // group, 1)
        first, count = columns.start // group, -(-columns.size // group)
        data_MK = packed.data[these, columns.start : columns.start + columns.size]
        return cls(data_MK.contiguous(), scale_MG[:, first : first + count].T.contiguous(), group)

    @classmethod
    def stacked(cls, parts: Sequence[Fp8Weight]) -> Fp8Weight:
        """The rows of several, whose groups of columns are the same."""
        data_MK = torch.cat([part.data_MK.view(torch.uint8) for part in parts]).view(E4M3)
        return cls(data_MK, torch.cat([part.scale_GM for part in parts], dim=1), parts[0].group)

    def __len__(self) -> int:
        return len(self.data_MK)

    @property
    def device(self) -> torch.device:
        return self.data_MK.device

    @property
    def dtype(self) -> torch.dtype:
        return self.data_MK.dtype

    def __getitem__(self, rows: Tensor) -> Fp8Weight:
        """Its rows at the indices given."""
        data_MK = self.data_MK.view(torch.uint8)[rows].view(E4M3)
        return Fp8Weight(data_MK, self.scale_GM[:, rows].contiguous(), self.group)

    def to(self, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self.data_MK.to(device), self.scale_GM.to(device), self.group)


Dense = Tensor | Fp8Weight  # [M, K]


class Linear(Protocol):
    """x [N, K] @ weight [M, K].T + bias [M], in x's dtype."""

    def __call__(self, x: Tensor, weight: Dense, bias: Tensor | None = None, /) -> Tensor: ...


def ordered_rows(weight: Dense, starts: Iterable[int], order: Sequence[int]) -> Tensor:
    """int64 [M]: the indices of all rows, with the len(order) rows from each of `starts` on permuted by
    `order`."""
    rows, turned = torch.arange(len(weight)), torch.tensor(order)
    for start in starts:
        rows[start : start + len(order)] = start + turned
    return rows.to(weight.device)


def keeps_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matrices in FP8 stay so on this device, in models that compute in `dtype`."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return runs_triton(device) and torch.cuda.get_device_capability(device) >= (9, 0)


def linear(x_NK: Tensor, weight_MK: Dense, bias_M: Tensor | None = None) -> Tensor:
    """See `Linear`; the fastest product: the last bits of a row may depend on N."""
    if isinstance(weight_MK, Tensor):
        return F.linear(x_NK, weight_MK, bias_M)
    from turnout.kernels.common import rows
    from turnout.kernels.common.fp8_weights import decode

    parts_PNM = _parts(x_NK, weight_MK, None)
    if parts_PNM is not None:
        return rows.add(parts_PNM, bias_M, x_NK.dtype)
    y_NM = x_NK.new_empty(len(x_NK), len(weight_MK))
    height = max(1, MOST_DECODED // x_NK.shape[1] // HEIGHT) * HEIGHT
    for first in range(0, len(weight_MK), height):
        these = slice(first, first + height)
        data_MK, scale_GM = weight_MK.data_MK[these], weight_MK.scale_GM[:, these]
        decoded_MK = decode(data_MK, scale_GM, weight_MK.group, x_NK.dtype)
        torch.mm(x_NK, decoded_MK.T, out=y_NM[:, these])
    return y_NM if bias_M is None else y_NM.add_(bias_M)


def invariant_linear(x_NK: Tensor, weight_MK: Dense, bias_M: Tensor | None = None) -> Tensor:
    """See `Linear`; the bits of a row do not depend on other rows (kernels/common/rowwise.py)."""
    if isinstance(weight_MK, Tensor):
        return rowwise.linear(x_NK, weight_MK, bias_M)
    from turnout.kernels.common import row_gemm

    return row_gemm.linear(
        x_NK, weight_MK.data_MK, bias_M, scale_GM=weight_MK.scale_GM, group=weight_MK.group
    )


def product(multiply: Linear, x_NK: Tensor, weight_MK: Dense, bias_M: Tensor | None) -> Tensor:
    """[N, M] of `multiply`; or, of few rows on a GPU where it is `linear`, float32 parts [P, N, M] for
    whoever comes next to add up."""
    if multiply is not linear or x_NK.device.type != "cuda":
        return multiply(x_NK, weight_MK, bias_M)
    if isinstance(weight_MK, Tensor):
        return rowwise.product(F.linear, x_NK, weight_MK, bias_M)
    parts_PNM = _parts(x_NK, weight_MK, bias_M)
    return linear(x_NK, weight_MK, bias_M) if parts_PNM is None else parts_PNM


def summed_product(
    multiply: Linear, x_NK: Tensor, weight_MK: Dense, bias_M: Tensor | None, group: Group
) -> Tensor:
    """[N, M]: the sum over ranks of `group`, each of which has some of the columns; or, of one rank, what
    `product` gives."""
    if group.size == 1:
        return product(multiply, x_NK, weight_MK, bias_M)
    return group.all_reduce(multiply(x_NK, weight_MK, bias_M))


def product_of_both(multiply: Linear, x_NK: Tensor, large: Dense, small_RK: Tensor) -> Tensor | None:
    """Parts [P, N, M + R] of the products by `large` [M, K] and by `small` in one launch, of few rows on a
    GPU where `multiply` is `linear` and `large` is in FP8 (kernels/common/few_rows.py); None elsewhere."""
    if multiply is not linear or not isinstance(large, Fp8Weight) or not runs_triton(x_NK.device):
        return None
    from turnout.kernels.common import few_rows

    if not few_rows.runs(x_NK, large.data_MK, large.group):
        return None
    return few_rows.parts(x_NK, large.data_MK, large.scale_GM, None, small_RK.contiguous())


def normed_product(
    multiply: Linear, x_NH: Tensor, delta: Tensor | None, gain_H: Tensor, eps: float, weight_MH: Dense
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(x + delta, its norm, parts [P, N, M] of the latter's product) of one row on a GPU, where `multiply` is
    `linear`; None elsewhere."""
    if multiply is not linear or len(x_NH) != 1 or not runs_triton(x_NH.device):
        return None
    from turnout.kernels.common.normed_row import normed_parts

    if isinstance(weight_MH, Fp8Weight):
        scale_GM, group = weight_MH.scale_GM, weight_MH.group
        return normed_parts(x_NH, delta, gain_H, eps, weight_MH.data_MK, scale_GM=scale_GM, group=group)
    same = weight_MH.dtype == x_NH.dtype
    return normed_parts(x_NH, delta, gain_H, eps, weight_MH) if same else None


def gated_product(x: Tensor, token: Tensor, weight_MK: Dense, more_1M: Tensor) -> Tensor:
    """Parts [P, 1, M] of the product of a gated row, and `more`; see kernels/common/gated_row.py."""
    from turnout.kernels.common.gated_row import gated_parts

    if isinstance(weight_MK, Fp8Weight):
        scale_GM, group = weight_MK.scale_GM, weight_MK.group
        return gated_parts(x, token, weight_MK.data_MK, more_1M, scale_GM=scale_GM, group=group)
    return gated_parts(x, token, weight_MK, more_1M)


def _parts(x_NK: Tensor, weight_MK: Fp8Weight, bias_M: Tensor | None) -> Tensor | None:
    """Of up to SOME rows; with a bias of few."""
    from turnout.kernels.common import few_rows, row_gemm, split_gemm

    data_MK, scale_GM, group = weight_MK.data_MK, weight_MK.scale_GM, weight_MK.group
    if bias_M is None and few_rows.runs(x_NK, data_MK, group):
        return few_rows.parts(x_NK, data_MK, scale_GM)
    found = split_gemm.parts(x_NK, data_MK, bias_M, scale_GM=scale_GM, group=group)
    if found is not None or bias_M is not None or len(x_NK) > SOME:
        return found
    from turnout.kernels.hopper import dense_fp8

    if dense_fp8.faster(len(x_NK), *data_MK.shape) and dense_fp8.runs(x_NK, data_MK, group):
        return dense_fp8.parts(x_NK, data_MK, scale_GM)
    return row_gemm.parts(x_NK, data_MK, scale_GM, group)
