"""Stacks of matrices as the products here read them: panels of 16 outputs, in the format of the weights.

Panels of float32 are multiplied as they lie, and so are those of bfloat16 with few rows. Others are unpacked
to float32 before, a few panels at a time, into memory that stays in the L2 cache until the rows of their
expert are done: 16 weights in about 15 instructions. What comes out is what `formats` decodes, to the last
bit.

Legend: E matrices, N outputs, K inputs, B panels, 16 B = N.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnout.kernels.cpu.jit import inline, part
from turnout.kernels.cpu.tiles import AVX512, BF16_PANEL, F32_PANEL
from turnout.kernels.cpu.vectors import (
    LANES,
    load,
    load_bf16,
    load_e2m1,
    load_e4m3,
    load_e8m0,
    load_f16,
    load_int4,
    rounded_to_bf16,
    splat,
    store,
)

F16, NVFP4, MXFP4 = 2, 3, 4  # kinds of panels that are unpacked
BF16_PAIRS = 5  # of panels that only bf16.py multiplies
PAIRS = "bf16_pairs"  # their name
FP8, INT4 = 6, 7  # also unpacked
FP8_SCALE = np.float32(2.0**8)  # of an e4m3 (vectors.py)
KINDS = {torch.float32: F32_PANEL, torch.bfloat16: BF16_PANEL, torch.float16: F16}
# Of 4 bits: kind, columns that share a scale, type of scales.
PACKED = {
    "nvfp4": (NVFP4, 16, torch.uint8),
    "mxfp4": (MXFP4, 32, torch.uint8),
    "int4": (INT4, 32, torch.bfloat16),
}
NVFP4_SCALE = np.float32(2.0**22)  # 2^14 for an e2m1 and 2^8 for an e4m3 (vectors.py)
MXFP4_SCALE = np.float32(2.0**14)
WIDENED_ROWS = 48  # rows from which bfloat16 panels are unpacked too, which otherwise each tile would widen
UNPACKED = 2**19  # bytes of panels that are unpacked at a time, so that those of gate and up fit an L2 cache


@part
def unpack(kind, panel, scales, factor, K, to):
    """Panel [K, 16] at `panel`, with rows of 16 scales at `scales`, to float32 at `to`.

    factor: float32 that multiplies an NVFP4 panel.
    """
    if kind == BF16_PANEL:
        for k in range(K):
            store(to + k * 64, load_bf16(panel + k * 32))
    elif kind == F16:
        for k in range(K):
            store(to + k * 64, load_f16(panel + k * 32))
    elif kind == FP8:
        for first in range(0, K, 128):
            scale = load(scales + first // 128 * 64) * splat(FP8_SCALE)
            for k in range(first, min(first + 128, K)):
                store(to + k * 64, load_e4m3(panel + k * 16) * scale)
    elif kind == NVFP4:
        whole = splat(factor * NVFP4_SCALE)
        for group in range(K // 16):
            scale = load_e4m3(scales + group * 16)
            for k in range(group * 16, group * 16 + 16):
                store(to + k * 64, load_e2m1(panel + k * 8) * scale * whole)
    elif kind == INT4:
        for group in range(K // 32):
            scale = load_bf16(scales + group * 32)
            for k in range(group * 32, group * 32 + 32):
                store(to + k * 64, rounded_to_bf16(load_int4(panel + k * 8) * scale))
    else:
        for group in range(K // 32):
            scale = load_e8m0(scales + group * 16)
            for k in range(group * 32, group * 32 + 32):
                store(to + k * 64, load_e2m1(panel + k * 8) * splat(MXFP4_SCALE) * scale)


@inline
def unpacks(kind, rows):
    """Whether panels are unpacked for products with so many rows of an expert."""
    return kind > BF16_PANEL or (kind == BF16_PANEL and AVX512 and rows >= WIDENED_ROWS)


@inline
def readable(unpacked, kind, panel, stride, scales, scale, factor, K, count, scratch):
    """Where `products` reads `count` panels, `stride` bytes apart: there, or unpacked at `scratch`."""
    if not unpacked:
        return panel
    for i in range(count):
        unpack(kind, panel + i * stride, scales + i * scale, factor, K, scratch + i * K * 64)
    return scratch


@inline
def panels_at_once(unpacked, rows, K):
    """How many panels a loop over tiles gives each of them: few, that they stay in a cache, but enough for
    tiles of few rows, and with AVX512 of any."""
    if unpacked:
        return max(min(UNPACKED // (64 * K), 4), 1) if AVX512 else 1
    return 4 if rows == 1 or AVX512 else 2


class Panels:
    """E matrices [N, K]; N is a multiple of 16.

    data: [E, B, K, 16] of float32, bfloat16 or float16, or of bfloat16 [E, B, K / 2, 16, 2], K padded with
    zeros to a multiple of 32 (PAIRS: bf16.py), or of e4m3 uint8 [E, B, K, 16], or of 4 bits uint8
    [E, B, K, 8]: column c in the low and c + 8 in the high nibble. scales: float32 [E, B, K / 128, 16] (FP8)
    or uint8 [E, B, K / 16, 16] (NVFP4, e4m3) or [E, B, K / 32, 16] of uint8 (MXFP4, e8m0) or bfloat16 (INT4).
    factors: float32 [E], such as NVFP4's global scales.
    """

    def __init__(self, shape: Sequence[int], kind: torch.dtype | str) -> None:
        """Uninitialised storage of `shape`, E, N, K. kind: a dtype, "fp8", "nvfp4", "mxfp4", "int4" or
        PAIRS."""
        self.experts, self.outputs, self.inputs = experts, outputs, inputs = shape
        blocks = experts, outputs // LANES
        self.scales, self.factors = torch.empty(0), torch.ones(experts)
        if kind == PAIRS:
            self.kind = BF16_PAIRS
            self.data = torch.zeros(*blocks, -(-inputs // 32) * 16, LANES, 2, dtype=torch.bfloat16)
        elif isinstance(kind, torch.dtype):
            self.kind = KINDS[kind]
            self.data = torch.empty(*blocks, inputs, LANES, dtype=kind)
        elif kind == "fp8":
            self.kind = FP8
            self.data = torch.empty(*blocks, inputs, LANES, dtype=torch.uint8)
            self.scales = torch.empty(*blocks, -(-inputs // 128), LANES)
        else:
            self.kind, group, dtype = PACKED[kind]
            self.data = torch.empty(*blocks, inputs, LANES // 2, dtype=torch.uint8)
            self.scales = torch.empty(*blocks, inputs // group, LANES, dtype=dtype)

    @property
    def packed(self) -> bool:
        return self.data.dtype == torch.uint8

    def scratch(self, rows: int) -> int:
        """Float32 values that one thread unpacks at a time for products with `rows` rows of an expert."""
        if not unpacks(self.kind, rows):
            return 0
        return panels_at_once(True, rows, self.inputs) * self.inputs * LANES

    def write(self, expert: int, weight_NK: Tensor, factor: Tensor | float = 1.0) -> None:
        """Store one matrix, of any float dtype, that is meant to be multiplied by `factor`."""
        if self.kind == BF16_PAIRS:
            pairs_BCKP = weight_NK.unflatten(0, (-1, LANES)).unflatten(2, (-1, 2))
            self.data[expert, :, : self.inputs // 2].copy_(pairs_BCKP.transpose(1, 2))
        else:
            self.data[expert].copy_(_across(weight_NK))
        self.factors[expert] = factor

    def write_packed(self, expert: int, codes: Tensor, scale: Tensor, factor: Tensor | float | None) -> None:
        """Store one matrix of 4 bits. codes: uint8 [N, K / 2], even columns of K in the low nibble; scale:
        e4m3 [N, K / 16], or uint8 or bfloat16 [N, K / 32]; factor: NVFP4's global scale."""
        nibbles_NK = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        nibbles_BKC = _across(nibbles_NK)
        self.data[expert] = nibbles_BKC[..., : LANES // 2] | nibbles_BKC[..., LANES // 2 :] << 4
        self.scales[expert] = _across(scale.view(self.scales.dtype))
        if factor is not None:
            self.factors[expert] = factor

    def write_fp8(self, expert: int, codes: Tensor, scale: Tensor, block_rows: int) -> None:
        """Store one matrix of e4m3 [N, K]. scale: float32 [ceil(N / block_rows), ceil(K / 128)]."""
        self.data[expert] = _across(codes.view(torch.uint8))
        self.scales[expert] = _across(scale.repeat_interleave(block_rows, dim=0)[: self.outputs])

    @property
    def panel_bytes(self) -> int:
        return self.data.stride(1) * self.data.element_size()

    @property
    def scale_bytes(self) -> int:
        """Of one panel."""
        return self.scales.stride(1) * self.scales.element_size() if self.scales.numel() else 0


def _across(matrix_NK: Tensor) -> Tensor:
    """[N, K] -> [B, K, 16]"""
    return matrix_NK.unflatten(0, (-1, LANES)).transpose(1, 2)
