"""NVFP4: e2m1 values, an e4m3 scale per group of 16 along K, a float32 global scale per tensor.

    x ~= e2m1 * e4m3 * global_scale          global_scale = amax / (6 * 448)

Scales multiply, as ModelOpt stores them (`weight_scale_2`, `input_scale`). Kernels are given the
reciprocal `a = 1 / global_scale` for activations; the arithmetic here is theirs, in float32 and in
their order of operations (FlashInfer and TensorRT-LLM, `cvt_warp_fp16_to_fp4`):

    sf = e4m3(a * (amax * (1 / 6)))          code = e2m1(x * (1 / (sf * (1 / a))))

except that their reciprocals are approximate to an ulp.

* A group whose scale rounds to zero (all zeros, or too small for the global scale) has scale 0 and
  codes 0; kernels may store other codes there, which decode to the same zeros.
* Scales and values saturate at 448 and 6; an infinity takes its group's scale to 448.
* A NaN makes its group's scale NaN, so the whole group decodes to NaN rather than to a number.

`global_scale` is a scalar, or has the leading dimensions of x: `[E]` for x `[E, N, K]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats import e2m1, fp8

GROUP = 16
GLOBAL_MAX = e2m1.MAX * fp8.MAX
_SMALLEST_GLOBAL = 2.0**-100  # below about 2**-119 the reciprocal of a group's scale overflows float32


def global_scale(x: Tensor, lead: int = 0) -> Tensor:
    """`amax / (6 * 448)` as float32 `x.shape[:lead]`: one per tensor, or per leading index.

    1 where all elements are zero, and at least 2**-100, so that it can always be divided by.
    """
    amax = x.abs().flatten(lead).amax(dim=-1).float()
    return torch.where(amax == 0, 1.0, (amax / GLOBAL_MAX).clamp(min=_SMALLEST_GLOBAL))


def encode(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """x float [..., K] to (packed uint8 [..., K/2], scale e4m3 [..., K/16])."""
    value, scale = _quantize(x, global_scale)
    return e2m1.pack(e2m1.encode(value.flatten(-2))), scale


# Weights and activations are quantised alike: the global scale comes from the tensor itself or from
# calibration.
quantize_activation = encode


def decode(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """packed uint8 [..., K/2], scale e4m3 [..., K/16] to float32 [..., K]: e2m1 * (e4m3 * global)."""
    value = e2m1.decode_packed(packed).unflatten(-1, (-1, GROUP))
    return value.mul_(_group_scale(scale, global_scale)).flatten(-2)


def fake_quantize(x: Tensor, global_scale: Tensor) -> Tensor:
    """`decode(encode(x))` in float32 [..., K], without making the codes."""
    value, scale = _quantize(x, global_scale)
    return e2m1.round_to_e2m1(value).mul_(_group_scale(scale, global_scale)).flatten(-2)


def _quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(x in units of its group's scale, float32 [..., K/16, 16]; scale e4m3 [..., K/16])."""
    if x.shape[-1] % GROUP:
        raise ValueError(f"NVFP4 needs a last dimension divisible by {GROUP}: shape {tuple(x.shape)}")
    groups = x.float().unflatten(-1, (-1, GROUP))
    to_global = _align(global_scale, x.ndim)
    amax = groups.abs().amax(dim=-1)
    scale = fp8.saturate((1.0 / to_global) * (amax * (1.0 / e2m1.MAX)))
    inverse = 1.0 / (scale.float() * to_global)
    inverse = torch.where(scale.float() == 0, 0.0, inverse)
    return groups * inverse.unsqueeze(-1), scale


def _group_scale(scale: Tensor, global_scale: Tensor) -> Tensor:
    """float32 [..., K/16, 1]: what an e2m1 value of each group is multiplied by."""
    return (scale.float() * _align(global_scale, scale.ndim)).unsqueeze(-1)


def _align(global_scale: Tensor, ndim: int) -> Tensor:
    """The global scale as float32 with trailing ones, to broadcast over its leading dimensions."""
    trailing = ndim - global_scale.ndim
    if trailing < 0:
        raise ValueError(f"global scale of shape {tuple(global_scale.shape)} for a {ndim}-D tensor")
    return global_scale.float().reshape(*global_scale.shape, *(1,) * trailing)
