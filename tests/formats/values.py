"""Inputs that leave nothing out, and conversions done by ml_dtypes rather than by us."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor


def every_bfloat16() -> Tensor:
    """float32 [65536]: all bfloat16 values, subnormals, infinities and NaN among them."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    return codes.view(torch.bfloat16).float()


def around(points: list[float]) -> Tensor:
    """float32: each point with its two neighbours, of both signs."""
    x = np.array(points, np.float32)
    near = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    return torch.from_numpy(np.concatenate([near, -near]))


def to_codes(x: Tensor, dtype: type) -> Tensor:
    """uint8 codes of float32 values converted by ml_dtypes."""
    return torch.from_numpy(x.numpy().astype(dtype).view(np.uint8))


def from_codes(codes: Tensor, dtype: type) -> Tensor:
    """float32 values of uint8 codes, converted by ml_dtypes."""
    return torch.from_numpy(codes.numpy().view(dtype).astype(np.float32))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal float32 tensors, the sign of zero included and any NaN equal to any other."""
    nan = a.isnan() & b.isnan()
    return a.shape == b.shape and bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all())


E2M1 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
