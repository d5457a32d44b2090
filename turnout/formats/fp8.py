"""FP8: e4m3 values with a float32 scale per 128x128 block (weights) or 128 columns (activations).

With MXFP4 weights (W4A8), activations have one scale per row.

    x ~= e4m3 * scale          scale = amax / 448

DeepSeek-V3's scheme: weight scales come with the checkpoint (`weight_scale_inv`, which multiplies
despite its name), activation scales are computed per token. Both round to nearest, ties to even.

* An all-zero block has scale 1, so scales are always positive.
* Values saturate at 448; an infinity takes its block's scale to the largest one, FLT_MAX / 448.
* A NaN makes its block's scale NaN, so the whole block decodes to NaN rather than to a number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.formats.spec import FORMATS
from turnout.vocabulary import Format

BLOCK = FORMATS[Format.FP8].group  # rows and columns
MAX = 448.0
DTYPE = torch.float8_e4m3fn


def saturate(x: Tensor) -> Tensor:
    """x as e4m3, clamped to +-448 first: torch's own conversion turns overflow into NaN."""
    return x.clamp(-MAX, MAX).to(DTYPE)


def encode_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight float [..., N, K] to (e4m3 [..., N, K], float32 [..., ceil(N/128), ceil(K/128)]).

    Blocks at the lower and right edge may be smaller than 128 x 128.
    """
    n, k = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scale = _scale(blocks.abs().amax(dim=(-3, -1)))
    data = saturate(blocks / scale[..., :, None, :, None])
    return data.flatten(-2).flatten(-3, -2)[..., :n, :k].contiguous(), scale


def decode_blocks(data: Tensor, scale: Tensor) -> Tensor:
    """data e4m3 [..., N, K], scale [..., ceil(N/128), ceil(K/128)] to float32 [..., N, K]."""
    n, k = data.shape[-2:]
    expected = (*data.shape[:-2], -(-n // BLOCK), -(-k // BLOCK))
    if scale.shape != expected:
        raise ValueError(f"FP8 data {tuple(data.shape)} needs scale {expected}, not {tuple(scale.shape)}")
    columns = scale.float().repeat_interleave(BLOCK, dim=-1)[..., :k]
    weight = data.float()
    for row, start in enumerate(range(0, n, BLOCK)):
        weight[..., start : start + BLOCK, :].mul_(columns[..., row : row + 1, :])
    return weight


def encode_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """x float [..., K] to (e4m3 [..., K], scale float32 [..., K/128]), scaled per row and 128 columns."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"FP8 activations need a last dimension divisible by {BLOCK}: {tuple(x.shape)}")
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = _scale(groups.abs().amax(dim=-1))
    return saturate(groups / scale.unsqueeze(-1)).flatten(-2), scale


def decode_activation(data: Tensor, scale: Tensor) -> Tensor:
    """data e4m3 [..., K], scale float32 [..., K/128] to float32 [..., K]."""
    groups = data.float().unflatten(-1, (-1, BLOCK))
    return groups.mul_(scale.float().unsqueeze(-1)).flatten(-2)


def fake_quantize(x: Tensor) -> Tensor:
    """x float [..., K] rounded as `encode_activation` rounds it, in float32; its last group may be cut."""
    K = x.shape[-1]
    return decode_activation(*encode_activation(F.pad(x, (0, -K % BLOCK))))[..., :K]


def fake_quantize_rows(x: Tensor) -> Tensor:
    """x float [..., K] rounded to e4m3 with one scale per row, in float32: the activations of W4A8."""
    scale = _scale(x.float().abs().amax(dim=-1, keepdim=True))
    return saturate(x.float() / scale).float() * scale


def _scale(amax: Tensor) -> Tensor:
    # By a tensor: on GPUs torch multiplies by a number's reciprocal, which rounds otherwise than dividing.
    scale = amax.clamp(max=torch.finfo(torch.float32).max) / torch.full_like(amax, MAX)
    return torch.where(scale == 0, 1.0, scale)
