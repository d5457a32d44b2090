"""Number formats in plain torch: encode, decode, and what each format costs and needs.

`encode(weight, "nvfp4")` gives a PackedTensor, `PackedTensor.decode()` gives it back. The modules
hold the parts: e2m1, nvfp4, mxfp4 and fp8 the arithmetic, scales the resolution of NVFP4's scales,
layouts the orders in which kernels want weights and scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.errors import UserError
from turnout.formats import fp8, mxfp4, nvfp4
from turnout.formats.packed import FORMATS, PackedTensor

__all__ = [
    "FORMATS",
    "FORMAT_INFO",
    "FormatError",
    "FormatInfo",
    "PackedTensor",
    "all_finite",
    "check",
    "encode",
]


class FormatError(UserError):
    """A weight that the wanted format cannot hold; the message says which, why and what to do."""


@dataclass(frozen=True, kw_only=True)
class FormatInfo:
    """One row of the format table; the documentation is generated from it."""

    name: str
    values: str  # what one element is
    group: str  # elements that share a scale
    scale: str  # what that scale is
    bits_per_weight: float  # large matrices, scales included
    k_multiple: int  # columns must be a multiple of it
    needs: str  # what hardware must have to multiply in this format; anything else decodes first


FORMAT_INFO: dict[str, FormatInfo] = {
    info.name: info
    for info in (
        FormatInfo(
            name="bf16",
            values="bfloat16 (or float16, float32 as the checkpoint has it)",
            group="-",
            scale="-",
            bits_per_weight=16,
            k_multiple=1,
            needs="nothing",
        ),
        FormatInfo(
            name="fp8",
            values="e4m3",
            group="128 x 128 block",
            scale="float32",
            bits_per_weight=8 + 32 / fp8.BLOCK**2,
            k_multiple=1,
            needs="FP8 tensor cores (compute capability 8.9 or later) for W8A8",
        ),
        FormatInfo(
            name="nvfp4",
            values="e2m1",
            group="16 along K",
            scale="e4m3, and a float32 per expert",
            bits_per_weight=4 + 8 / nvfp4.GROUP,
            k_multiple=nvfp4.GROUP,
            needs="FP4 tensor cores (compute capability 10.0 or later) for W4A4",
        ),
        FormatInfo(
            name="mxfp4",
            values="e2m1",
            group="32 along K",
            scale="e8m0 (a power of two)",
            bits_per_weight=4 + 8 / mxfp4.GROUP,
            k_multiple=mxfp4.GROUP,
            needs="nothing for W4A16; FP4 tensor cores (compute capability 10.0 or later) for W4A4",
        ),
    )
}


def check(format: str, shape: torch.Size | tuple[int, ...], name: str = "weight") -> None:
    """Raise FormatError if a weight of this shape `[..., N, K]` cannot be held in `format`."""
    if format not in FORMAT_INFO:
        raise FormatError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    if len(shape) < 2 or 0 in shape:
        raise FormatError(f"{name}: a weight is a non-empty matrix [..., N, K], not {list(shape)}")
    multiple = FORMAT_INFO[format].k_multiple
    if shape[-1] % multiple:
        raise FormatError(
            f"{name} {list(shape)}: {format} needs columns in multiples of {multiple}, not {shape[-1]}; "
            "choose another format or pad the weight"
        )


def all_finite(x: Tensor) -> bool:
    """Whether a non-empty tensor has neither NaN nor infinities, many times faster than `isfinite`."""
    return all(torch.isfinite(extreme).item() for extreme in x.aminmax())


def encode(
    weight: Tensor, format: str, *, global_scale: Tensor | None = None, name: str = "weight"
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
    if format == "bf16":
        return PackedTensor(format="bf16", data=weight.to(torch.bfloat16))
    if format == "fp8":
        data, scale = fp8.encode_blocks(weight)
        return PackedTensor(format="fp8", data=data, scale=scale)
    if format == "mxfp4":
        data, scale = mxfp4.encode(weight)
        return PackedTensor(format="mxfp4", data=data, scale=scale)
    if global_scale is None:
        global_scale = nvfp4.global_scale(weight, lead=weight.ndim - 2)
    data, scale = nvfp4.encode(weight, global_scale)
    return PackedTensor(format="nvfp4", data=data, scale=scale, global_scale=global_scale)
