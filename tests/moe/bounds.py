"""Asserting that a runner keeps what is promised of its accuracy (turnout/moe/accuracy.py)."""

from __future__ import annotations

from torch import Tensor

from turnout.moe.accuracy import BOUNDS, relative_error

__all__ = ["BOUNDS", "assert_close", "relative_error"]


def assert_close(y: Tensor, ref: Tensor, *, activation_format: str, compute_dtype: str) -> None:
    assert y.shape == ref.shape
    error = relative_error(y.cpu(), ref.cpu())
    bound = BOUNDS[activation_format, compute_dtype]
    assert error <= bound, f"relative error {error:.2e} is above {bound:.0e}"
