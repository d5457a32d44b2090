"""Where tensors are, for kernels that run on some GPUs only."""

from __future__ import annotations

import torch
from torch import Tensor


def on_hopper(x: Tensor) -> bool:
    """Whether x is where code for Hopper (sm_90a) runs, which no other generation runs."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
