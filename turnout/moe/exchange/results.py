"""How results of experts travel back through torch.distributed: as they are, or in FP8.

FP8 is e4m3 with a float32 scale per row and 128 columns: half the bytes of bfloat16. Each rank's part of a
sum is rounded for itself, here its own part as well; the parts are decoded and summed as others are.

Legend: N rows, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats import fp8
from turnout.moe.dispatch import DispatchSetup


class Results:
    """`encode` on the way out, `decode` where they arrive."""

    def __init__(self, setup: DispatchSetup) -> None:
        self._format, self._dtype, self._hidden = setup.combine_format, setup.dtype, setup.spec.hidden_size

    def encode(self, out_NH: Tensor) -> Tensor:
        """Rows that travel: [N, H] of the compute dtype, or uint8 [N, H + H / 32], values and then scales."""
        if self._format == "bf16":
            return out_NH.to(self._dtype)
        data, scale = fp8.encode_activation(out_NH.to(self._dtype))
        rows = torch.empty(len(out_NH), self._hidden * 33 // 32, dtype=torch.uint8, device=out_NH.device)
        for part, values in zip(self._parts(rows), (data, scale), strict=True):
            part.copy_(values)
        return rows

    def decode(self, rows: Tensor) -> Tensor:
        """[N, H] of the compute dtype."""
        if self._format == "bf16":
            return rows
        return fp8.decode_activation(*self._parts(rows)).to(self._dtype)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Views: e4m3 [N, H], float32 [N, H / 128]."""
        return rows[:, : self._hidden].view(fp8.DTYPE), rows[:, self._hidden :].view(torch.float32)
