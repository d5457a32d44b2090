"""A checkpoint as a model reads it: tensors on the device in the compute type, and fused projections."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from turnout.checkpoint import Checkpoint
from turnout.models.blocks import GatedMLP


class Weights:
    """Reads tensors of one checkpoint, one at a time, so that no more than one is in flight."""

    def __init__(self, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype):
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.tensor(name, shape, self.dtype).to(self.device)

    def linear(self, prefix: str, rows: int, columns: int) -> Tensor:
        """`prefix.weight` [rows, columns], decoded if the checkpoint quantised it."""
        return self.checkpoint.linear(prefix, (rows, columns), self.dtype).to(self.device)

    def fused(self, rows: Mapping[str, int], columns: int) -> Tensor:
        """The weights of several linear layers of the same input, stacked by rows in the order given."""
        out = torch.empty(sum(rows.values()), columns, dtype=self.dtype, device=self.device)
        for part, (prefix, count) in zip(out.split(list(rows.values())), rows.items(), strict=True):
            part.copy_(self.checkpoint.linear(prefix, (count, columns), self.dtype))
        return out

    def fused_bias(self, rows: Mapping[str, int]) -> Tensor:
        return torch.cat([self.tensor(f"{prefix}.bias", count) for prefix, count in rows.items()])

    def gated_mlp(self, prefix: str, hidden: int, intermediate: int) -> GatedMLP:
        rows = {f"{prefix}.{name}": intermediate for name in ("gate_proj", "up_proj")}
        return GatedMLP(self.fused(rows, hidden), self.linear(f"{prefix}.down_proj", hidden, intermediate))


def release_freed_memory() -> None:
    """Hand the pages of freed temporaries back to the system.

    glibc keeps holes between live blocks below 32 MB; after loading a small model layer by layer they
    amount to a third of its weights. Other allocators have no such call and need none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
