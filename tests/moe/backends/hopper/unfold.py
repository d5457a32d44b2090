"""Hopper's fragments back to weights: the inverses of fragments.py and fragments_fp8.py, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.moe.backends.hopper import fragments_fp8 as fp8
from turnout.moe.backends.hopper.fragments import BLOCK, GROUP, Fragments
from turnout.moe.backends.hopper.fragments_fp8 import FragmentsFP8
from turnout.vocabulary import Format


def from_fragments(fragments: Fragments, *, paired: bool) -> Tensor:
    """The weights as float32 [E, N, K]: the inverse of `to_fragments`, decoding as the kernels do."""
    weight_ENK = (_int4 if fragments.format == Format.INT4 else _e2m1)(fragments)
    weight_ENK = weight_ENK * fragments.alpha[:, None, None]
    if paired:
        weight_ENK = unpair_rows(weight_ENK)
        half = fragments.rows // 2
        gate_ENK, up_ENK = weight_ENK.chunk(2, dim=1)
        weight_ENK = torch.cat((gate_ENK[:, :half], up_ENK[:, :half]), dim=1)
    return weight_ENK[:, : fragments.rows, : fragments.columns]


def _e2m1(fragments: Fragments) -> Tensor:
    E, n, k, _ = fragments.codes.shape
    codes_ENK = _unfold_codes(fragments.codes.view(torch.uint8)).view(E, n * BLOCK, k * BLOCK)
    scale_ENG = _unfold_scales(fragments.scales.view(torch.uint8), fragments.format)
    values = (codes_ENK.to(torch.int32) & 8) << 12 | (codes_ENK.to(torch.int32) & 7) << 6
    value_ENK = (
        values.to(torch.int16).view(torch.bfloat16).float() * 2.0**63
    )  # 2^126 in two steps: it overflows with a scale
    scale_ENK = scale_ENG.repeat_interleave(GROUP[fragments.format], dim=2)
    return value_ENK * (scale_ENK * 2.0**-63)


def _int4(fragments: Fragments) -> Tensor:
    """Values and scales by the thread that holds them: a code in the mantissa of 128, less 136."""
    E, n, k, _ = fragments.codes.shape
    word = fragments.codes.view(E, n, k, 4, 8, 4, 4)  # warp, lane / 4, lane % 4, step
    registers = [word >> 4 * i & 0x000F000F | 0x43004300 for i in range(4)]
    pairs = torch.stack(registers, dim=-1).unsqueeze(-1).view(torch.bfloat16) - 136  # ..., register, odd
    value = pairs.unflatten(-2, (2, 2))  # right, lower
    scale = fragments.scales.view(E, n, k, 4, 8, 2).unsqueeze(-1).view(torch.bfloat16)  # ..., word, lower
    scale = scale.repeat_interleave(2, dim=-2)  # step
    # E, n, k, warp, lane / 4, lane % 4, step, right, lower, odd
    axes = value * scale[:, :, :, :, :, None, :, None, :, None]
    axes = axes.permute(0, 1, 3, 8, 4, 2, 6, 7, 5, 9)
    return axes.reshape(E, n * BLOCK, k * BLOCK).float()


def from_fragments_fp8(fragments: FragmentsFP8, *, paired: bool) -> Tensor:
    """The weights as float32 [E, N, K], decoding as the kernel does; the inverse but for rounding."""
    byte_ENK = _unfold_codes_fp8(fragments.codes)
    byte_ENG = _unfold_scales_fp8(fragments.scales)
    table = torch.tensor([0, 0x08, 0x10, 0x14, 0x18, 0x1C, 0x20, 0x24], device=byte_ENK.device)
    code = byte_ENK.long()
    bits = table[code & 7] + 8 * byte_ENG.long().repeat_interleave(fp8.GROUP, 2) * ((code & 7) > 0)
    value = (bits | (code & 8) << 4).to(torch.uint8).view(torch.float8_e4m3fn).float()
    weight_ENK = value * fragments.alpha[:, :, None]
    if paired:
        half = fragments.rows // 2
        parts = (part[:, :half] for part in unpair_rows(weight_ENK).chunk(2, dim=1))
        weight_ENK = torch.cat(tuple(parts), dim=1)
    return weight_ENK[:, : fragments.rows, : fragments.columns]


def unpair_rows(weight: Tensor) -> Tensor:
    """The inverse of `pair_rows`."""
    *lead, N, K = weight.shape
    return weight.view(*lead, N // 16, 2, 8, K).transpose(-4, -3).reshape(*lead, N, K)


def _unfold_codes(folded: Tensor) -> Tensor:
    """bytes [E, N/64, K/64, 2048] -> uint8 codes [E, N, K]."""
    E, n, k, _ = folded.shape
    pair = folded.view(E, n, k, 4, 8, 4, 4, 2, 2).to(torch.int32)
    half = pair[..., 0] | pair[..., 1] << 8  # E, n, k, warp, lane / 4, lane % 4, step, odd
    codes = (
        (half >> 15 & 1) << 3 | half >> 6 & 7,
        (half >> 9 & 1) << 3 | half & 7,
        (half >> 5 & 1) << 3 | half.flip(-1) >> 12 & 7,
        (half >> 11 & 1) << 3 | (half >> 3 & 3) << 1 | half >> 10 & 1,
    )
    axes = torch.stack(codes, dim=-1).unflatten(-1, (2, 2))  # ..., right, lower
    # E, n, warp, lower, lane / 4, k, step, right, lane % 4, odd
    axes = axes.permute(0, 1, 3, 9, 4, 2, 6, 8, 5, 7)
    return axes.reshape(E, n * BLOCK, k * BLOCK).to(torch.uint8)


def _unfold_scales(folded: Tensor, format: str) -> Tensor:
    """bytes [E, N/64, K/64, .] -> float32 [E, N, K/G], with the factor 2^126."""
    E, n, k, size = folded.shape
    per = size // BLOCK
    axes = folded.view(E, n, k, 4, 8, per // 2, 2, 2).permute(0, 1, 3, 6, 4, 2, 5, 7)
    byte = axes.reshape(E, n * BLOCK, k * per).to(torch.int32)
    bits = byte << 7 if format == Format.MXFP4 else (byte << 4) + (235 << 7)
    scale = bits.to(torch.int16).view(torch.bfloat16).float()
    return scale.masked_fill(byte == 0, 0.0)


def _unfold_codes_fp8(folded: Tensor) -> Tensor:
    """int32 [E, K/128, N/64, 1024] -> uint8 codes [E, N, K]."""
    E, k, n, _ = folded.shape
    word = folded.to(torch.int64).view(E, k, n, 2, 4, 8, 4, 2, 2)
    codes = [
        word >> 16 * right + 4 * place & 7 | (word >> 8 * place + (3 if right else 7) & 1) << 3
        for right in range(2)
        for place in range(4)
    ]
    axes = torch.stack(codes, dim=-1).unflatten(-1, (2, 4))
    # E, n, warp, lower, lane / 4, k, pair, tile, right, lane % 4, place
    axes = axes.permute(0, 2, 4, 8, 5, 1, 3, 7, 9, 6, 10)
    return axes.reshape(E, n * fp8.ROWS, k * fp8.COLUMNS).to(torch.uint8)


def _unfold_scales_fp8(folded: Tensor) -> Tensor:
    """int32 [E, K/128, N/64, 64] -> uint8 [E, N, K/32]."""
    E, k, n, _ = folded.shape
    axes = folded.contiguous().view(torch.uint8).view(E, k, n, 2, 4, 8, 2, 2)
    return axes.permute(0, 2, 4, 7, 5, 1, 3, 6).reshape(E, n * fp8.ROWS, k * 4)
