"""Programmatic dependent launch: kernels that begin before their predecessors end, and wait for them."""

from __future__ import annotations

from functools import cache

import torch


@cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels on `device` may: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
