"""NVFP4: e2m1 values, an e4m3 scale per group of 16 along K, a float32 global scale per tensor.

    x ~= e2m1 * e4m3 * global_scale          global_scale = amax / (6 * 448)

Scales multiply, as ModelOpt stores them (`weight_scale_2`, `input_scale`). `global_scale` is a scalar,
or has the leading dimensions of x: `[E]` for x `[E, N, K]`.

Weights are encoded as ModelOpt and compressed-tensors write them, with true divisions:

    sf = e4m3(amax / (6 * global_scale))     code = e2m1(x / (sf * global_scale))

and sf at least 2**-9, its smallest value: rounding it to zero would lose groups that fit. Activations
are quantised as kernels do it, given `a = 1 / global_scale`, in their order of operations (FlashInfer
and TensorRT-LLM, `cvt_warp_fp16_to_fp4`; their reciprocals are approximate to an ulp, ours are not):

    sf = e4m3(a * (amax * (1 / 6)))          code = e2m1(x * (1 / (sf * (1 / a))))

A group whose sf is zero (all zeros, or too small for the global scale) then has codes 0; kernels may
store other codes there, which decode to the same zeros.

Of both: scales and values saturate at 448 and 6; an infinity takes its group's scale to 448; a NaN makes
its group's scale NaN, so the whole group decodes to NaN rather than to a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats import e2m1, fp8
from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format

GROUP = FORMATS[Format.NVFP4].group
GLOBAL_MAX = e2m1.MAX * fp8.MAX
SMALLEST_SCALE = 2.0**-9  # the smallest positive e4m3
_SMALLEST_GLOBAL = 2.0**-100  # below about 2**-119 the reciprocal of a group's scale overflows float32


def global_scale(x: Tensor, lead: int = 0) -> Tensor:
    """`amax / (6 * 448)` as float32 `x.shape[:lead]`: one per tensor, or per leading index.

    1 where all elements are zero, and at least 2**-100, so that it can always be divided by.
    """
    amax = x.abs().flatten(lead).amax(dim=-1).float()
    return torch.where(amax == 0, 1.0, (amax / GLOBAL_MAX).clamp(min=_SMALLEST_GLOBAL))


def encode(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Weights float [..., K] to (packed uint8 [..., K/2], scale e4m3 [..., K/16])."""
    groups, amax = _groups(x)
    to_global = _align(global_scale, x.ndim)
    scale = fp8.saturate((amax / (e2m1.MAX * to_global)).clamp(min=SMALLEST_SCALE))
    value = groups / (scale.float() * to_global).unsqueeze(-1)
    return e2m1.pack(e2m1.encode(value.flatten(-2))), scale


def quantize_activation(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Activations float [..., K] to (packed uint8 [..., K/2], scale e4m3 [..., K/16]), as kernels do."""
    value, scale = _quantize_activation(x, global_scale)
    return e2m1.pack(e2m1.encode(value.flatten(-2))), scale


def decode(packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """packed uint8 [..., K/2], scale e4m3 [..., K/16] to float32 [..., K]: e2m1 * (e4m3 * global)."""
    value = e2m1.decode_packed(packed).unflatten(-1, (-1, GROUP))
    return value.mul_(_group_scale(scale, global_scale)).flatten(-2)


def fake_quantize(x: Tensor, global_scale: Tensor) -> Tensor:
    """`decode(quantize_activation(x))` in float32 [..., K], without making the codes."""
    value, scale = _quantize_activation(x, global_scale)
    return e2m1.round_to_e2m1(value).mul_(_group_scale(scale, global_scale)).flatten(-2)


def _quantize_activation(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(x in units of its group's scale, float32 [..., K/16, 16]; scale e4m3 [..., K/16])."""
    groups, amax = _groups(x)
    to_global = _align(global_scale, x.ndim)
    scale = fp8.saturate((1.0 / to_global) * (amax * (1.0 / e2m1.MAX)))
    inverse = 1.0 / (scale.float() * to_global)
    inverse = torch.where(scale.float() == 0, 0.0, inverse)
    return groups * inverse.unsqueeze(-1), scale


def _groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x float32 [..., K/16, 16] and the largest magnitude of each group [..., K/16]."""
    if x.shape[-1] % GROUP:
        raise ValueError(f"NVFP4 needs a last dimension divisible by {GROUP}: shape {tuple(x.shape)}")
    groups = x.float().unflatten(-1, (-1, GROUP))
    return groups, groups.abs().amax(dim=-1)


def _group_scale(scale: Tensor, global_scale: Tensor) -> Tensor:
    """float32 [..., K/16, 1]: what an e2m1 value of each group is multiplied by."""
    return (scale.float() * _align(global_scale, scale.ndim)).unsqueeze(-1)


def _align(global_scale: Tensor, ndim: int) -> Tensor:
    """The global scale as float32 with trailing ones, to broadcast over its leading dimensions."""
    trailing = ndim - global_scale.ndim
    if trailing < 0:
        raise ValueError(f"global scale of shape {tuple(global_scale.shape)} for a {ndim}-D tensor")
    return global_scale.float().reshape(*global_scale.shape, *(1,) * trailing)
