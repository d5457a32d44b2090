"""Weights into a number format: checks of what a format can hold, and `encode`.

`encode(weight, Format.NVFP4)` gives a PackedTensor, `PackedTensor.decode()` gives the weight back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.errors import UserError
from turnout.formats import fp8, int4, mxfp4, nvfp4
from turnout.formats.packed import PackedTensor
from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format


class FormatError(UserError):
    """A weight that the wanted format cannot hold; the message says which, why and what to do."""


def check(format: Format, shape: torch.Size | tuple[int, ...], name: str = "weight") -> None:
    """Raise FormatError if a weight of this shape `[..., N, K]` cannot be held in `format`."""
    if format not in FORMATS:
        raise FormatError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    if len(shape) < 2 or 0 in shape:
        raise FormatError(f"{name}: a weight is a non-empty matrix [..., N, K], not {list(shape)}")
    multiple = FORMATS[format].k_multiple
    if shape[-1] % multiple:
        raise FormatError(
            f"{name} {list(shape)}: {format} needs columns in multiples of {multiple}, not {shape[-1]}; "
            "choose another format or pad the weight"
        )


def all_finite(x: Tensor) -> bool:
    """Whether a non-empty tensor has neither NaN nor infinities, many times faster than `isfinite`."""
    return all(torch.isfinite(extreme).item() for extreme in x.aminmax())


def encode(
    weight: Tensor, format: Format, *, global_scale: Tensor | None = None, name: str = "weight"
) -> PackedTensor:
    """Weights float [..., N, K] in `format`, one NVFP4 global scale per leading index.

    `global_scale` (NVFP4 only) overrides the one computed from the weight, so that gate and up can
    share theirs. Raises FormatError, naming `name`, for shapes the format cannot hold and for NaN and
    infinities: a weight that has them is broken, and quantising would hide it.
    """
    check(format, weight.shape, name)
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise FormatError(
            f"{name}: only float16, bfloat16, float32 and float64 are encoded, not {weight.dtype}"
        )
    if not all_finite(weight):
        bad = int((~torch.isfinite(weight)).sum())
        raise FormatError(
            f"{name} {list(weight.shape)}: {bad} values are NaN or infinite; the source is broken"
        )
    if format == Format.BF16:
        return PackedTensor(format=Format.BF16, data=weight.to(torch.bfloat16))
    if format == Format.FP8:
        data, scale = fp8.encode_blocks(weight)
        return PackedTensor(format=Format.FP8, data=data, scale=scale)
    if format == Format.MXFP4:
        data, scale = mxfp4.encode(weight)
        return PackedTensor(format=Format.MXFP4, data=data, scale=scale)
    if format == Format.INT4:
        data, scale = int4.encode(weight)
        return PackedTensor(format=Format.INT4, data=data, scale=scale)
    if global_scale is None:
        global_scale = nvfp4.global_scale(weight, lead=weight.ndim - 2)
    data, scale = nvfp4.encode(weight, global_scale)
    return PackedTensor(format=Format.NVFP4, data=data, scale=scale, global_scale=global_scale)
