"""Activations of columns that are gate and up in turn, for kernels that take them as a function (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_of_pairs(x):
    """x float32 [M, 2 N] -> silu(gate) * up [M, N]."""
    gate, up = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return gate / (1 + tl.exp(-gate)) * up
