"""Matrices cut into panels, for CPUs: one layout that serves both few rows and many.

A matrix [N, K] (outputs, inputs) is stored as B panels [K, W] of W adjacent outputs each, N = B * W, so
that a product reads memory strictly in order. Two products:

* `gather_product`: few rows, each with a matrix of its own. A product with one row is a weighted sum of
  panel rows, which is what `embedding_bag` computes: one call for all rows and matrices, with a kernel
  generated for W (FBGEMM), float32 accumulation, threads over panels. Its result for a row depends on
  nothing but that row: batch-invariant.
* `product`: many rows with one matrix, a batched GEMM over its panels, in float32.

Legend: E matrices, N outputs, K inputs, B panels of W outputs, M rows of one matrix, S sums of C rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_WIDTH = 96  # 12 vectors of 8: what the kernel keeps in registers in one pass (AVX2)
MIN_WIDTH = 16
INDEX_ROWS = 2**18  # panel rows to name in one call: their index and factors, 2 MB, then stay in cache


def panel_width(outputs: int) -> int:
    """The largest divisor of `outputs` up to MAX_WIDTH; all of them if no divisor is of use."""
    width = next(w for w in range(min(outputs, MAX_WIDTH), 0, -1) if outputs % w == 0)
    return width if width >= MIN_WIDTH else outputs


class Panels:
    """E matrices [N, K] as `data` [E, B, K, W], float32 or bfloat16, on the CPU."""

    def __init__(self, experts: int, outputs: int, inputs: int, width: int, dtype: torch.dtype) -> None:
        """Uninitialised storage; `width` divides `outputs`."""
        self.outputs = outputs
        self.data = torch.empty(experts, outputs // width, inputs, width, dtype=dtype)
        self._rows_BK = torch.arange(outputs // width * inputs, dtype=torch.int32).view(-1, inputs)

    def write(self, expert: int, weight_NK: Tensor) -> None:
        """Store one matrix, of any float dtype."""
        _, B, K, W = self.data.shape
        self.data[expert].copy_(weight_NK.view(B, W, K).transpose(1, 2))

    def gather_product(self, expert_SC: Tensor, x_SCK: Tensor) -> Tensor:
        """Every row times the matrix chosen for it, summed over the C rows of each of S sums.

        expert_SC: int32 [S, C]; x_SCK: [S, C, K], any float dtype, may be an expanded view.
        Returns [S, N] in the panels' dtype.
        """
        _, B, K, _ = self.data.shape
        at_once = max(1, INDEX_ROWS // max(1, expert_SC.numel() * K))
        x_SCK = x_SCK.to(self.data.dtype)
        parts = [
            self._panel_sums(expert_SC, x_SCK, first, min(at_once, B - first))
            for first in range(0, B, at_once)
        ]
        sums_BSW = parts[0] if len(parts) == 1 else torch.cat(parts)
        return sums_BSW.transpose(0, 1).flatten(1)

    def _panel_sums(self, expert_SC: Tensor, x_SCK: Tensor, first: int, count: int) -> Tensor:
        """[b, S, W] of `count` panels b from `first` on."""
        _, B, K, W = self.data.shape
        S, C = expert_SC.shape
        rows_bK = self._rows_BK[first : first + count]
        rows_bSCK = expert_SC.view(1, S, C, 1) * (B * K) + rows_bK.view(count, 1, 1, K)
        starts = torch.arange(0, count * S * C * K, C * K, dtype=torch.int32)
        sums, *_ = torch.embedding_bag(
            self.data.view(-1, W),
            rows_bSCK.view(-1),
            starts,
            per_sample_weights=x_SCK.expand(count, S, C, K).reshape(-1),
        )
        return sums.view(count, S, W)

    def product(self, expert: int, x_MK: Tensor, out_MN: Tensor) -> None:
        """out = x @ W_expert.T, all float32."""
        panels_BKW = self.data[expert].float()
        B, _, W = panels_BKW.shape
        y_BMW = torch.bmm(x_MK.expand(B, *x_MK.shape), panels_BKW)
        out_MN.unflatten(-1, (B, W)).copy_(y_BMW.transpose(0, 1))
