"""e2m1: the four-bit float of NVFP4 and MXFP4, two codes per byte.

A code is `s eem`: bit 3 the sign, magnitudes 0 .5 1 1.5 2 3 4 6 for codes 0 to 7. There is no NaN and
no infinity. Encoding rounds to nearest, ties to the even code, and saturates at 6, as
`cvt.rn.satfinite.e2m1x2.f32` does (PTX ISA, "cvt"): +-Inf becomes +-6, NaN becomes +6, and the sign of
zero is kept. Callers who must not lose a NaN carry it in the group's scale (see nvfp4, mxfp4, fp8).

A byte holds elements 2i (low nibble) and 2i+1 (high nibble) of the last dimension.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def round_to_e2m1(x: Tensor) -> Tensor:
    """The nearest e2m1 value of every element, as float32 of the same shape."""
    value = torch.nan_to_num(x.float(), nan=MAX).clamp_(-MAX, MAX)
    # Neighbouring values lie 0.5 apart below 2, 1 apart below 4, then 2: half of the power of two
    # below |x|, which masking out sign and mantissa leaves. value/step is then an integer of the
    # code's parity, so that rounding half to even rounds ties to the even code.
    step = (value.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(1.0, 4.0).mul_(0.5)
    return value.div_(step).round_().mul_(step)


def encode(x: Tensor) -> Tensor:
    """Codes 0 to 15, uint8 of the shape of `x` (any float dtype)."""
    value = round_to_e2m1(x)
    sign = torch.signbit(value).to(torch.uint8).mul_(8)
    magnitude = value.abs_()
    # Three straight lines whose minimum passes through every (magnitude, code) pair.
    code = torch.minimum(2 * magnitude, magnitude + 2)
    return torch.minimum(code, magnitude.mul_(0.5).add_(4)).to(torch.uint8).add_(sign)


def decode(codes: Tensor) -> Tensor:
    """float32 values of codes 0 to 15 (uint8 of any shape)."""
    table = _values(codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] into bytes [..., K/2], even index in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack an odd number of four-bit codes: shape {tuple(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 bytes [..., K/2] into codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: Tensor) -> Tensor:
    """float32 values [..., K] of bytes [..., K/2]: one table look-up yields both of a byte's values."""
    pairs = _pairs(packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


@cache
def _values(device: torch.device) -> Tensor:
    """float32 [16]: the value of every code."""
    with torch.inference_mode(False):
        positive = torch.tensor(MAGNITUDES, device=device)
        return torch.cat((positive, -positive))


@cache
def _pairs(device: torch.device) -> Tensor:
    """int64 [256]: for every byte, its two float32 values side by side."""
    with torch.inference_mode(False):
        every_byte = torch.arange(256, dtype=torch.uint8, device=device)
        pairs = _values(device)[unpack(every_byte[:, None]).int()]
        return pairs.view(torch.int64).view(256)
