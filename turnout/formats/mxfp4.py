"""MXFP4: e2m1 values with a power-of-two scale (e8m0) per group of 32 along K.

    x ~= e2m1 * 2 ** (b - 127)          b = 255 means NaN

The scale follows the OCP Microscaling specification (v1.0, section 6.3): the exponent is
`floor(log2(amax)) - 2`, 2 being that of e2m1's largest value. A group's largest element then lies in
[4, 8) before rounding, and what exceeds 6 saturates. Rounding the exponent up instead would never
saturate but lose a bit for most groups.

* The exponent is clamped to -127..127; an all-zero group has b = 0.
* An infinity counts as the largest float32 and saturates to +-6 times its group's scale.
* A NaN makes its group's scale NaN (b = 255), so the whole group decodes to NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats import e2m1
from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format

GROUP = FORMATS[Format.MXFP4].group
BIAS = 127
NAN = 255
E2M1_MAX_EXPONENT = 2


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """x float [..., K] to (packed uint8 [..., K/2], e8m0 scale as uint8 [..., K/32])."""
    if x.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 needs a last dimension divisible by {GROUP}: shape {tuple(x.shape)}")
    groups = x.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(dim=-1)
    # frexp's mantissa lies in [.5, 1), hence the 1; its exponent of an infinity is unspecified.
    exponent = torch.frexp(amax.clamp(max=torch.finfo(torch.float32).max)).exponent - 1 - E2M1_MAX_EXPONENT
    exponent = torch.where(amax == 0, -BIAS, exponent).clamp_(-BIAS, BIAS)
    inverse = ((BIAS - exponent) << 23).view(torch.float32)
    scale = torch.where(amax.isnan(), NAN, exponent + BIAS).to(torch.uint8)
    return e2m1.pack(e2m1.encode((groups * inverse.unsqueeze(-1)).flatten(-2))), scale


def decode(packed: Tensor, scale: Tensor) -> Tensor:
    """packed uint8 [..., K/2], e8m0 scale as uint8 [..., K/32] to float32 [..., K]."""
    value = e2m1.decode_packed(packed).unflatten(-1, (-1, GROUP))
    return value.mul_(decode_scale(scale).unsqueeze(-1)).flatten(-2)


def decode_scale(scale: Tensor) -> Tensor:
    """float32 `2 ** (b - 127)` of e8m0 bytes given as uint8; 255 is NaN."""
    return scale.view(torch.float8_e8m0fnu).float()
