"""How results of experts come back: as they are, or in FP8.

FP8 is e4m3 with a float32 scale per row and 128 columns: half the bytes of bfloat16. Each rank's part of a
sum is rounded for itself, here its own part as well; the parts are decoded and summed as others are.

Legend: N rows, H hidden, W words of 8 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats import fp8
from turnout.moe.interface import DispatchSetup
from turnout.moe.wire_format import fp8_columns, row_of
from turnout.vocabulary import Format


class Results:
    """`encode` on the way out, `decode` where they arrive."""

    def __init__(self, setup: DispatchSetup) -> None:
        self._format, self._dtype = setup.combine_format, setup.dtype
        self._parts = row_of(*fp8_columns(setup.spec.hidden_size))

    def encode(self, out_NH: Tensor) -> Tensor:
        """Rows as sent: [N, H] of the compute dtype, or int64 [N, W], values and then scales."""
        if self._format == Format.BF16:
            return out_NH.to(self._dtype)
        words = self._parts[-1].stop
        rows_NW = torch.empty(len(out_NH), words, dtype=torch.int64, device=out_NH.device)
        for part, values in zip(self._parts, fp8.encode_activation(out_NH.to(self._dtype)), strict=True):
            part.of(rows_NW).copy_(values)
        return rows_NW

    def decode(self, rows: Tensor) -> Tensor:
        """[N, H] of the compute dtype."""
        if self._format == Format.BF16:
            return rows
        data_NH, scale = (part.of(rows) for part in self._parts)
        return fp8.decode_activation(data_NH, scale).to(self._dtype)
