"""A weight matrix (or a stack of them) as stored: codes, scales and the name of the format.

What each `Format` is stored as:

| name  | data                     | scale                                  | global_scale     |
|-------|--------------------------|----------------------------------------|------------------|
| bf16  | float [..., N, K]        | -                                      | -                |
| fp8   | e4m3  [..., N, K]        | float32 [..., ceil(N/128), ceil(K/128)]| -                |
| nvfp4 | uint8 [..., N, K/2]      | e4m3  [..., N, K/16]                   | float32 [...]    |
| mxfp4 | uint8 [..., N, K/2]      | uint8 (e8m0) [..., N, K/32]            | -                |
| int4  | uint8 [..., N, K/2]      | bfloat16 [..., N, K/32]                | -                |

`bf16` means "not quantised": its data may also be float16 or float32. Scales are plain row-major
(never swizzled) and always multiply: `w = decode(data) * scale * global_scale`, of int4
rounded to bfloat16.

fp8 gate and up [I, K] stacked to [2I, K] with I no multiple of 128 keep their own blocks: `block_rows` is
then the largest height that both are cut into, and scale is float32 [..., N/block_rows, ceil(K/128)].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """Weights `[..., N, K]` in one `Format`; leading dimensions (experts) are optional."""

    format: Format
    data: Tensor
    scale: Tensor | None = None
    global_scale: Tensor | None = None
    block_rows: int = FORMATS[Format.FP8].block_rows  # rows that share an fp8 scale

    @property
    def shape(self) -> torch.Size:
        """Logical shape `[..., N, K]`."""
        *lead, n, k = self.data.shape
        return torch.Size((*lead, n, 2 * k if FORMATS[self.format].bits == 4 else k))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.parts())

    def parts(self) -> list[Tensor]:
        return [t for t in (self.data, self.scale, self.global_scale) if t is not None]

    def __getitem__(self, index: int | slice | Tensor) -> PackedTensor:
        """The same weights for some of the leading (expert) dimension."""
        return replace(
            self,
            data=self.data[index],
            scale=None if self.scale is None else self.scale[index],
            global_scale=None if self.global_scale is None else self.global_scale[index],
        )

    def to(self, device: torch.device | str) -> PackedTensor:
        return replace(
            self,
            data=self.data.to(device),
            scale=None if self.scale is None else self.scale.to(device),
            global_scale=None if self.global_scale is None else self.global_scale.to(device),
        )

    def row_part(self, index: int, count: int, *, stacked: int) -> PackedTensor:
        """Part `index` of `count` of the rows of each of `stacked` matrices, in storage of its own.

        [..., N, K] -> [..., N / count, K]. Raises ValueError where equal parts would cut through rows that
        share a scale.
        """
        unit = self.block_rows if self.format == Format.FP8 else 1
        return self._part(-2, stacked, index, count, unit)

    def column_part(self, index: int, count: int) -> PackedTensor:
        """[..., N, K] -> [..., N, K / count]; otherwise as `row_part`."""
        return self._part(-1, 1, index, count, FORMATS[self.format].group)

    def _part(self, dim: int, stacked: int, index: int, count: int, unit: int) -> PackedTensor:
        if self.shape[dim] % (stacked * count * unit):
            what = "rows" if dim == -2 else "columns"
            each = f" of {stacked} stacked matrices" if stacked > 1 else ""
            raise ValueError(
                f"{self.format} weights {list(self.shape)}: {what}{each} in {count} equal parts are no "
                f"multiple of {unit}"
            )
        return replace(
            self,
            data=equal_part(self.data, dim, index, count, stacked=stacked),
            scale=None if self.scale is None else equal_part(self.scale, dim, index, count, stacked=stacked),
        )

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Plain weights `[..., N, K]` in `dtype`, computed in float32 and rounded once."""
        from turnout.formats import fp8, int4, mxfp4, nvfp4

        if self.format == Format.BF16:
            return self.data.to(dtype)
        assert self.scale is not None, f"{self.format} weights carry a scale"
        if self.format == Format.FP8 and self.block_rows != fp8.BLOCK:
            blocks = self.data.unflatten(-2, (-1, self.block_rows))
            return fp8.decode_blocks(blocks, self.scale.unsqueeze(-2)).flatten(-3, -2).to(dtype)
        if self.format == Format.FP8:
            return fp8.decode_blocks(self.data, self.scale).to(dtype)
        if self.format == Format.MXFP4:
            return mxfp4.decode(self.data, self.scale).to(dtype)
        if self.format == Format.INT4:
            return int4.decode(self.data, self.scale).to(dtype)
        assert self.global_scale is not None, "nvfp4 weights carry a global scale"
        return nvfp4.decode(self.data, self.scale, self.global_scale).to(dtype)


def equal_part(x: Tensor, dim: int, index: int, count: int, *, stacked: int) -> Tensor:
    """Part `index` of `count` of each of `stacked` runs of dimension `dim` < 0: a contiguous copy."""
    parts = x.unflatten(dim, (stacked, count, -1)).select(dim - 1, index)
    return parts.clone(memory_format=torch.contiguous_format).flatten(dim - 1, dim)
