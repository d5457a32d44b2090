"""Quantise and restore, with the gradient passed straight through.

The values are those that the 4-bit checkpoint's weights decode to and, for NVFP4, those that W4A4
kernels see as activations, so that what is trained is what will be served.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats import e2m1, mxfp4, nvfp4

BF16, NVFP4, MXFP4 = range(3)


def weight(w: Tensor, mode: Tensor, lead: int) -> Tensor:
    """w [..., K] as it is, or as NVFP4 (a global scale for each of the `lead` leading dimensions) or
    MXFP4 restores it, by the scalar `mode`."""
    exact = w.detach()
    nv = nvfp4.fake_quantize(exact, nvfp4.global_scale(exact, lead))
    restored = torch.where(mode == NVFP4, nv, torch.where(mode == MXFP4, _mxfp4(exact), exact))
    return w + (restored - exact)


def activation(x: Tensor, mode: Tensor, amax: Tensor) -> Tensor:
    """x [..., K] as it is or, under NVFP4, quantised with the global scale that fits `amax`."""
    exact = x.detach()
    restored = nvfp4.fake_quantize(exact, amax / nvfp4.GLOBAL_MAX).to(x.dtype)
    return x + torch.where(mode == NVFP4, restored - exact, 0.0)


def _mxfp4(w: Tensor) -> Tensor:
    """`mxfp4.decode(*mxfp4.encode(w))` in arithmetic that torch.compile can fuse."""
    groups = w.float().unflatten(-1, (-1, mxfp4.GROUP))
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp_min(2.0**-100)
    power = (amax.view(torch.int32) & 0x7F800000).view(torch.float32)
    scale = power * 2.0**-mxfp4.E2M1_MAX_EXPONENT
    return (e2m1.round_to_e2m1(groups / scale) * scale).flatten(-2)
