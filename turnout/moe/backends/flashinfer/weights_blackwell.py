"""NVFP4 expert weights in the form that kernels for Blackwell take.

All take codes row by row and block scales in tiles of 128 rows and 4 groups (layouts.py). In which order the
rows are, of codes and scales alike, is what tells one kernel's form from another's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from turnout.formats import fp8, layouts
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

# Of [E, N, X], any X, to storage of its own. CuTe DSL kernels with the activation in GEMM1 take up and gate
# as `layouts.interleave_up_gate` gives them, TensorRT-LLM's what is not gated as `layouts.shuffle_rows` does.
RowOrder = Callable[[Tensor], Tensor]


def as_they_are(rows: Tensor) -> Tensor:
    """Gate rows, then up rows: masked kernels, whose activation is a kernel of its own."""
    return rows.clone()


def shuffled_up_gate(rows: Tensor) -> Tensor:
    """TensorRT-LLM's kernels: up, gate, up, gate, ..., then shuffled."""
    return layouts.shuffle_rows(layouts.interleave_gate_up_rows(layouts.swap_halves(rows)))


class Nvfp4Matrix:
    """One GEMM's weights [E, N, K].

    codes:    uint8 [E, N, K/2]
    swizzled: uint8 [E, ceil(N/128), ceil(K/64), 32, 4, 4]
    """

    def __init__(self, weights: PackedTensor, order: RowOrder, device: torch.device) -> None:
        if weights.format != Format.NVFP4 or weights.scale is None:
            raise ValueError(f"nvfp4 weights with block scales are needed, not {weights.format}")
        scales = weights.scale.to(device).view(torch.uint8)
        self.codes = order(weights.data.to(device)).contiguous()
        self.swizzled = layouts.swizzle(order(scales))
        self.rows, self.inner = weights.shape[1:]

    @property
    def mma_scales(self) -> Tensor:
        """uint8 [32, 4, ceil(N/128), 4, ceil(K/64), E], a view of `swizzled`."""
        return layouts.mma_view(self.swizzled)

    @property
    def flat_scales(self) -> Tensor:
        """e4m3 [E, N, K/16] in name only: the tiles one after the other. Needs N % 128 == K % 64 == 0."""
        E, N = self.codes.shape[:2]
        return self.swizzled.view(E, N, -1).view(fp8.DTYPE)

    def load(self, other: Nvfp4Matrix) -> None:
        """Take over another's values in the same storage."""
        self.codes.copy_(other.codes)
        self.swizzled.copy_(other.swizzled)
