"""A checkpoint as a model reads it: tensors on the device in the compute type, and fused projections."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from turnout.checkpoint import Checkpoint
from turnout.models.blocks import GatedMLP
from turnout.models.dense import Dense, Fp8Weight, Linear, keeps_fp8, linear
from turnout.models.shares import Share, whole
from turnout.models.staging import Staging
from turnout.parallel.groups import Group


class Weights:
    """Reads tensors of one checkpoint, one at a time, so that no more than one is in flight; for CUDA, the
    experts of two layers.

    read_ahead: a thread that reads what is needed next, for devices that prepare weights themselves. staging:
    memory that matrices pass on their way to such a device.

    What is not in a rank's share is not kept; rows that are not are not even read, unless quantised.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: torch.device,
        dtype: torch.dtype,
        multiply: Linear = linear,
    ):
        """multiply: what linear layers made of these weights compute with."""
        self.checkpoint, self.device, self.dtype, self.multiply = checkpoint, device, dtype, multiply
        self._keeps_fp8 = keeps_fp8(device, dtype)
        self.read_ahead: ThreadPoolExecutor | None = None
        self.staging: Staging | None = None
        if device.type == "cuda":
            checkpoint.pin()
            self.staging = Staging()
            current = torch.cuda.current_device()  # of each thread
            self.read_ahead = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(current,))

    def close(self) -> None:
        """All is read."""
        if self.staging is not None:
            self.staging.close()

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.tensor(name, shape, self.dtype).to(self.device)

    def norm(self, prefix: str, size: int, *, around_one: bool) -> Tensor:
        """What a norm multiplies by [size]. 1 + weight is float32: bfloat16 would lose small weights."""
        if not around_one:
            return self.tensor(f"{prefix}.weight", size)
        return 1 + self.checkpoint.tensor(f"{prefix}.weight", (size,), torch.float32).to(self.device)

    def linear(self, prefix: str, rows: Share, columns: Share, *, dtype: torch.dtype | None = None) -> Tensor:
        """`prefix.weight` [rows, columns], decoded if the checkpoint quantised it. dtype: not the model's."""
        if self.staging is None:
            return self._read(prefix, rows, columns, dtype or self.dtype).contiguous().to(self.device)
        out = torch.empty(rows.size, columns.size, dtype=dtype or self.dtype, device=self.device)
        self._read_staged(prefix, rows, columns, out, self.staging)
        return out

    def dense(self, rows: Mapping[str, Share], columns: Share) -> Dense:
        """As `fused`, but in FP8 where that is what all of them are stored in and the device decodes."""
        return self._packed(rows, columns) or self.fused(rows, columns)

    def fused(self, rows: Mapping[str, Share], columns: Share) -> Tensor:
        """The weights of several linear layers of the same input, stacked by rows in the order given."""
        sizes = [share.size for share in rows.values()]
        out = torch.empty(sum(sizes), columns.size, dtype=self.dtype, device=self.device)
        for part, (prefix, share) in zip(out.split(sizes), rows.items(), strict=True):
            if self.staging is None:
                part.copy_(self._read(prefix, share, columns, self.dtype))
            else:
                self._read_staged(prefix, share, columns, part, self.staging)
        return out

    def fused_bias(self, rows: Mapping[str, Share]) -> Tensor:
        return torch.cat(
            [
                self.tensor(f"{prefix}.bias", share.total).narrow(0, share.start, share.size)
                for prefix, share in rows.items()
            ]
        )

    def gated_mlp(
        self,
        prefix: str,
        hidden: int,
        intermediate: Share,
        group: Group,
        *,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        limit: float | None = None,
        token_gate: Tensor | None = None,
    ) -> GatedMLP:
        """group: the ranks that sum up their shares of it. limit, token_gate: see `GatedMLP`."""
        outer = whole(hidden)
        gate_up = self.dense({f"{prefix}.{name}": intermediate for name in names[:2]}, outer)
        down = self.dense({f"{prefix}.{names[2]}": outer}, intermediate)
        return GatedMLP(gate_up, down, group, self.multiply, limit, token_gate)

    def _packed(self, rows: Mapping[str, Share], columns: Share) -> Fp8Weight | None:
        if not self._keeps_fp8 or not all(self.checkpoint.is_fp8(prefix) for prefix in rows):
            return None
        parts = []
        for prefix, share in rows.items():
            packed = self.checkpoint.packed(prefix, (share.total, columns.total))
            part = Fp8Weight.of(packed, share, columns)
            if part is None:
                return None
            parts.append(part.to(self.device))
        return Fp8Weight.stacked(parts)

    def _read_staged(self, prefix: str, rows: Share, columns: Share, out: Tensor, staging: Staging) -> None:
        self.checkpoint.linear_into(
            prefix,
            (rows.total, columns.total),
            out,
            staging.memory,
            first=rows.start,
            first_column=columns.start,
        )

    def _read(self, prefix: str, rows: Share, columns: Share, dtype: torch.dtype) -> Tensor:
        shape = rows.total, columns.total
        read = self.checkpoint.linear(prefix, shape, dtype, first=rows.start, count=rows.size)
        return read.narrow(1, columns.start, columns.size)
