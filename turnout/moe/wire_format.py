"""Tokens as rows of bytes, so that one collective moves all of a token: hidden state, scales, ids, weights.

A row is a whole number of 8-byte words, the unit in which rows are gathered and sent; each part begins at a
word. Unpacked parts are views of the rows received.

Legend: T tokens, H hidden, k top-k, W words of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.formats import fp8, nvfp4
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.interface import DispatchSetup
from turnout.packages import runs_triton
from turnout.vocabulary import Format

WORD = 8  # bytes


@dataclass(frozen=True)
class Part:
    """Columns [start, stop) of a row, in words, hold `width` values of `dtype`."""

    dtype: torch.dtype
    width: int
    start: int

    @property
    def stop(self) -> int:
        return self.start - (-self.width * self.dtype.itemsize // WORD)

    def of(self, rows_TW: Tensor) -> Tensor:
        """[T, width], a view."""
        return rows_TW[:, self.start : self.stop].view(self.dtype)[:, : self.width]


def row_of(*columns: tuple[torch.dtype, int]) -> list[Part]:
    """A row that holds so many values of each dtype, one part after the other."""
    parts: list[Part] = []
    for dtype, width in columns:
        parts.append(Part(dtype, width, parts[-1].stop if parts else 0))
    return parts


def fp8_columns(H: int) -> tuple[tuple[torch.dtype, int], ...]:
    """Of H values in e4m3, with a scale per block."""
    return (fp8.DTYPE, H), (torch.float32, H // fp8.BLOCK)


class Wire:
    """The wire format of one layer in one phase: `encode` and `pack` to send, `unpack` to receive."""

    def __init__(self, setup: DispatchSetup) -> None:
        """Its input scale is needed for "nvfp4", whose receivers do not compute scales."""
        spec, device, dtype, input_scale = setup.spec, setup.device, setup.dtype, setup.input_scale
        self.format = setup.wire_format
        if self.format == Format.NVFP4 and input_scale is None:
            raise ValueError("nvfp4 on the wire needs the input scales of a calibrated checkpoint")
        self._input_scale = input_scale
        self._device = device
        H, k = spec.hidden_size, spec.top_k
        columns = {
            "bf16": ((dtype, H),),
            "fp8": fp8_columns(H),
            "nvfp4": ((torch.uint8, H // 2), (fp8.DTYPE, H // nvfp4.GROUP)),
        }[self.format]
        self._parts = row_of(*columns, (torch.int32, k), (torch.float32, k))
        self.words = self._parts[-1].stop
        whole = self.format != Format.BF16 or H * dtype.itemsize % WORD == 0
        self._fused = whole and runs_triton(device)

    def encode(self, x_TH: Tensor) -> Hidden:
        """x [T, H], any float dtype, in the format of this wire."""
        if self.format == Format.BF16:
            return Hidden(data=x_TH)
        if self.format == Format.FP8:
            data, scale = fp8.encode_activation(x_TH)
            return Hidden(data=data, format=Format.FP8, scale=scale)
        assert self._input_scale is not None, "checked when made"
        data, scale = nvfp4.quantize_activation(x_TH, self._input_scale)
        return Hidden(data=data, format=Format.NVFP4, scale=scale, global_scale=self._input_scale)

    def pack(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, rows: int | None = None
    ) -> Tensor:
        """int64 [T, W]; with `rows` above T, padding up to it: zeros, with expert ids -1."""
        return self._pack(x_TH, topk_ids_TK, topk_weights_TK, rows, None)

    def pack_some(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, token_R: Tensor
    ) -> Tensor:
        """int64 [R, W]: the rows of tokens `token_R`."""
        if self._fused:
            return self._pack(x_TH, topk_ids_TK, topk_weights_TK, len(token_R), token_R)
        return self.pack(x_TH, topk_ids_TK, topk_weights_TK).index_select(0, token_R)

    def _pack(
        self,
        x_TH: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        rows: int | None,
        token_R: Tensor | None,
    ) -> Tensor:
        T = len(x_TH)
        packed = torch.empty(T if rows is None else rows, self.words, dtype=torch.int64, device=self._device)
        if self._fused:
            return self._pack_in_one(x_TH, topk_ids_TK, topk_weights_TK, packed, token_R)
        hidden = self.encode(x_TH)
        given = [t for t in (hidden.data, hidden.scale, topk_ids_TK, topk_weights_TK) if t is not None]
        for part, values in zip(self._parts, given, strict=True):
            part.of(packed[:T]).copy_(values)
        if len(packed) > T:
            packed[T:] = 0
            self._parts[-2].of(packed[T:]).fill_(-1)
        return packed

    def _pack_in_one(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, packed: Tensor, token_R: Tensor | None
    ) -> Tensor:
        from turnout.kernels.common.pack import pack

        pack(
            x_TH.contiguous(),
            ids_TK.contiguous(),
            weights_TK.contiguous(),
            packed,
            [part.start for part in self._parts[1:]],
            format=str(self.format),
            global_scale=self._input_scale,
            source_R=token_R,
        )
        return packed

    def unpack(self, rows_TW: Tensor) -> TokensBatch:
        hidden, *scale, ids_TK, weights_TK = (part.of(rows_TW) for part in self._parts)
        return TokensBatch(
            hidden=Hidden(
                data=hidden,
                format=self.format,
                scale=scale[0] if scale else None,
                global_scale=self._input_scale if self.format == Format.NVFP4 else None,
            ),
            topk_ids=ids_TK,
            topk_weights=weights_TK,
        )
