"""Training by several processes that `torchrun` starts, each with its part of every batch and all parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among `size`; what is called of it is collective, and nothing where it is the only one."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def joined(cls, kind: str) -> Ranks:
        """Those of the environment that `torchrun` sets. kind: "cuda" or "cpu"."""
        size, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
        if size == 1:
            return cls(0, 1, device)
        if kind == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        return cls(dist.get_rank(), size, device)

    def share_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Every rank's become their mean."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self.mean(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def mean(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM) / self.size

    def largest(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def _reduced(self, x: Tensor, by: dist.ReduceOp) -> Tensor:
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x, by)
        return x

    def first(self, value: float) -> float:
        """The first rank's."""
        if self.size > 1:
            shared = torch.tensor(value, dtype=torch.float64, device=self.device)
            dist.broadcast(shared, 0)
            value = shared.item()
        return value

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
