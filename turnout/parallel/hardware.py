"""The device a plan is made for: measured on this machine, or named with `--hardware`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device of a rank. `architecture`: CUDA compute capability times ten (90: Hopper); CPU 0."""

    name: str
    device: str  # "cpu" or "cuda"
    architecture: int
    memory_bytes: int
