"""Products whose inner dimension is cut leave float32 parts [P, N, M], whose sum is meant (split_gemm.py).
The kernels behind them add parts up as they read them, so that no launch does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def count_parts(x: Tensor) -> int:
    """P of parts [P, N, M]; 1 of [N, M]."""
    return len(x) if x.dim() == 3 else 1


@triton.jit
def load_sum(at, part_stride, held, PARTS: tl.constexpr):
    """float32: the sum of what stands at `at` in each part."""
    x = tl.load(at, mask=held, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * part_stride, mask=held, other=0.0).to(tl.float32)
    return x
