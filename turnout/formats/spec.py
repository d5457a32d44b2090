"""The one table of number formats: bits, groups, scales, bytes. Imports no torch, so plans can use it.

Codecs (fp8.py, nvfp4.py, mxfp4.py, int4.py), plans, readers of checkpoints and the documentation take group
sizes and byte counts from here. Sources: OCP Microscaling Formats v1.0 (mxfp4); NVIDIA's NVFP4 as ModelOpt
writes it; DeepSeek-V3, section 3.3 (fp8 in blocks); compressed-tensors' `pack-quantized` (int4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from turnout.vocabulary import Format

# Bytes of a value of the torch dtypes that hidden states are computed in.
ITEMSIZE: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """One format, for weights [N, K] and, if `wire`, for hidden states [T, H] between ranks.

    group: columns that share a scale (1: there are no scales); a shard along K must be a multiple of it.
    block_rows: rows of a weight that share it too. Hidden states have scales of their own in every row.
    k_multiple: K of a weight must be a multiple of it; fp8 blocks at the edges may be smaller.
    """

    format: Format
    bits: int  # of one element
    group: int = 1
    block_rows: int = 1
    k_multiple: int = 1
    scale_bytes: int = 0
    tensor_scale_bytes: int = 0  # of the scale of one expert's whole matrix
    wire: bool = False
    values: str  # what one element is, for the documentation
    scale: str = "-"  # what its scales are
    needs: str  # what hardware must have to multiply in this format; anything else decodes first

    @property
    def bits_per_weight(self) -> float:
        """Of a large matrix, scales included."""
        return self.bits + 8 * self.scale_bytes / (self.group * self.block_rows)

    @property
    def shares_scale(self) -> str:
        """The elements that share a scale, in words."""
        if self.group == 1:
            return "-"
        return f"{self.block_rows} x {self.group} block" if self.block_rows > 1 else f"{self.group} along K"


FORMATS: Mapping[Format, FormatSpec] = MappingProxyType(
    {
        spec.format: spec
        for spec in (
            FormatSpec(
                format=Format.BF16,
                bits=16,
                wire=True,
                values="bfloat16 (or float16, float32 as the checkpoint has it)",
                needs="nothing",
            ),
            FormatSpec(
                format=Format.FP8,
                bits=8,
                group=128,
                block_rows=128,
                scale_bytes=4,
                wire=True,
                values="e4m3",
                scale="float32",
                needs="FP8 tensor cores (compute capability 8.9 or later) for W8A8",
            ),
            FormatSpec(
                format=Format.NVFP4,
                bits=4,
                group=16,
                k_multiple=16,
                scale_bytes=1,
                tensor_scale_bytes=4,
                wire=True,
                values="e2m1",
                scale="e4m3, and a float32 per expert",
                needs="FP4 tensor cores (compute capability 10.0 or later) for W4A4",
            ),
            FormatSpec(
                format=Format.MXFP4,
                bits=4,
                group=32,
                k_multiple=32,
                scale_bytes=1,
                values="e2m1",
                scale="e8m0 (a power of two)",
                needs="nothing for W4A16; FP4 tensor cores (compute capability 10.0 or later) for W4A4",
            ),
            FormatSpec(
                format=Format.INT4,
                bits=4,
                group=32,
                k_multiple=32,
                scale_bytes=2,
                values="integers -8 to 7",
                scale="bfloat16",
                needs="nothing for W4A16",
            ),
        )
    }
)

WEIGHT_FORMATS = tuple(FORMATS)
WIRE_FORMATS = tuple(format for format, spec in FORMATS.items() if spec.wire)


def matrix_bytes(format: Format, rows: int, columns: int, *, itemsize: int = 2) -> int:
    """One weight [rows, columns] with its scales; `itemsize` is that of unquantised weights."""
    spec = FORMATS[format]
    if not spec.scale_bytes:
        return rows * columns * itemsize
    scales = -(-rows // spec.block_rows) * -(-columns // spec.group)
    return rows * columns * spec.bits // 8 + spec.scale_bytes * scales + spec.tensor_scale_bytes


def token_parts(format: Format, hidden_size: int, *, itemsize: int) -> tuple[int, int]:
    """One token [H] between ranks: bytes of values, bytes of scales. `itemsize`: of the compute dtype."""
    spec = FORMATS[format]
    if not spec.wire:
        raise ValueError(f"{format} is a format of weights, not of hidden states between ranks")
    if not spec.scale_bytes:
        return itemsize * hidden_size, 0
    return hidden_size * spec.bits // 8, spec.scale_bytes * -(-hidden_size // spec.group)


def token_bytes(format: Format, hidden_size: int, *, itemsize: int = 2) -> int:
    """One token [H] between ranks, with its scales."""
    return sum(token_parts(format, hidden_size, itemsize=itemsize))
