"""Small tensors between host and device, without waiting: a copy that waits ends what runs ahead of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` as a tensor of `device`. On a GPU through pinned memory: other copies wait for its stream."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`; on a CPU the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host, from now on: what is launched later need not be waited for."""

    def __init__(self, tensor: Tensor):
        self._event: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._tensor = tensor.clone()  # the next step may overwrite it
            return
        self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._tensor.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def tolist(self) -> list:
        """Waits for the copy, and for nothing that was launched after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.tolist()
