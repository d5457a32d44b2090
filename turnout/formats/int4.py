"""INT4: integers -8 to 7 with a bfloat16 scale per group of 32 along K, as compressed-tensors has them.

    w = bf16(q * scale)          scale = bf16(amax / 7.5)

The product is rounded to bfloat16, which is what compressed-tensors decompresses to, and what kernels that
multiply in bfloat16 use: so the same weights come out everywhere, and unpacked ones lose nothing in bfloat16.

A byte holds the codes q + 8 of elements 2i (low nibble) and 2i + 1 (high nibble). Encoding rounds to nearest,
ties to even; a group's largest value may lie half a step beyond 7, and saturates. An all-zero group has
scale 1.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from turnout.formats import e2m1
from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format

GROUP = FORMATS[Format.INT4].group
OFFSET = 8  # between a code and its value
LEAST, MOST = -8, 7
STEPS = (MOST - LEAST) / 2  # of a scale, to a group's largest magnitude


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """x float [..., K], finite, to (packed uint8 [..., K/2], scale bfloat16 [..., K/32])."""
    if x.shape[-1] % GROUP:
        raise ValueError(f"INT4 needs a last dimension divisible by {GROUP}: shape {tuple(x.shape)}")
    groups = x.float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(dim=-1) / STEPS).bfloat16()
    scale = torch.where(scale == 0, 1.0, scale)
    value = (groups / scale.float().unsqueeze(-1)).round_().clamp_(LEAST, MOST)
    return e2m1.pack(value.add_(OFFSET).to(torch.uint8).flatten(-2)), scale


def decode(packed: Tensor, scale: Tensor) -> Tensor:
    """packed uint8 [..., K/2], scale bfloat16 [..., K/32] to float32 [..., K], which bfloat16 holds."""
    pairs = _pairs(packed.device).index_select(0, packed.reshape(-1).int())
    value = pairs.view(*packed.shape[:-1], -1, GROUP)
    return (value * scale.unsqueeze(-1)).flatten(-2).float()


@cache
def _pairs(device: torch.device) -> Tensor:
    """bfloat16 [256, 2]: the values of every byte."""
    with torch.inference_mode(False):
        every_byte = torch.arange(256, dtype=torch.uint8, device=device)
        return e2m1.unpack(every_byte[:, None]).to(torch.bfloat16) - OFFSET
