"""A checkpoint as a model reads it: tensors on the device in the compute type, and fused projections."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.checkpoint import Checkpoint
from turnout.kernels.common.rowwise import Linear
from turnout.models.blocks import GatedMLP
from turnout.models.shares import Share, whole
from turnout.parallel.groups import Group


class Weights:
    """Reads tensors of one checkpoint, one at a time, so that no more than one is in flight.

    What is not in a rank's share is not kept; rows that are not are not even read, unless quantised.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        dtype: torch.dtype,
        multiply: Linear = F.linear,
    ):
        """multiply: what linear layers made of these weights compute with."""
        self.checkpoint, self.device, self.dtype, self.multiply = checkpoint, device, dtype, multiply

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.tensor(name, shape, self.dtype).to(self.device)

    def linear(self, prefix: str, rows: Share, columns: Share, *, dtype: torch.dtype | None = None) -> Tensor:
        """`prefix.weight` [rows, columns], decoded if the checkpoint quantised it. dtype: not the model's."""
        return self._read(prefix, rows, columns, dtype or self.dtype).contiguous().to(self.device)

    def fused(self, rows: Mapping[str, Share], columns: Share) -> Tensor:
        """The weights of several linear layers of the same input, stacked by rows in the order given."""
        sizes = [share.size for share in rows.values()]
        out = torch.empty(sum(sizes), columns.size, dtype=self.dtype, device=self.device)
        for part, (prefix, share) in zip(out.split(sizes), rows.items(), strict=True):
            part.copy_(self._read(prefix, share, columns, self.dtype))
        return out

    def fused_bias(self, rows: Mapping[str, Share]) -> Tensor:
        return torch.cat(
            [
                self.tensor(f"{prefix}.bias", share.total).narrow(0, share.start, share.size)
                for prefix, share in rows.items()
            ]
        )

    def gated_mlp(self, prefix: str, hidden: int, intermediate: Share, group: Group) -> GatedMLP:
        """group: the ranks that sum up their shares of it."""
        outer = whole(hidden)
        gate_up = self.fused({f"{prefix}.{name}": intermediate for name in ("gate_proj", "up_proj")}, outer)
        down = self.linear(f"{prefix}.down_proj", outer, intermediate)
        return GatedMLP(gate_up, down, group, self.multiply)

    def _read(self, prefix: str, rows: Share, columns: Share, dtype: torch.dtype) -> Tensor:
        shape = rows.total, columns.total
        read = self.checkpoint.linear(prefix, shape, dtype, first=rows.start, count=rows.size)
        return read.narrow(1, columns.start, columns.size)


def release_freed_memory() -> None:
    """Hand the pages of freed temporaries back to the system.

    glibc keeps holes between live blocks below 32 MB; after loading a small model layer by layer they
    amount to a third of its weights. Other allocators have no such call and need none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
