"""Sizes that kernels round up."""

from __future__ import annotations


def power_of_two(n: int) -> int:
    """The smallest that is at least n."""
    return 1 << max(0, n - 1).bit_length()
