"""NVFP4 scales brought into the one form that runners take: checked, per expert, never guessed.

Checkpoints hold weight global scales `w_2` (one per expert; gate and up share it) and, when activations
are to be quantised too (W4A4), input scales `s = amax / (6 * 448)` for both GEMMs. A missing scale is
not 1, gate and up scales that differ are not one of the two, and a NaN is not a scale: every such case
is a ScaleError naming tensor, shape and file.

Legend: E experts of the layer, E_loc those held here, I intermediate size, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnout.errors import UserError
from turnout.formats import e2m1, fp8, nvfp4
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.vocabulary import Format

SMALLEST = 1e-12  # of a divisor; kernels keep alpha finite in the same way


class ScaleError(UserError):
    """A scale that cannot be used as it is; the message names tensor, shape and remedy."""

    def __init__(self, problem: str, *, name: str, scale: Tensor | None):
        shape = "absent" if scale is None else f"shape {list(scale.shape)}"
        super().__init__(f"tensor {name} ({shape}): {problem}")


def per_expert(scale: Tensor | None, *, name: str, num_experts: int, experts: range | None = None) -> Tensor:
    """float32 [len(experts)] of a scale given as scalar, [E], [E_loc], [E, 2] or [E_loc, 2].

    `experts` are the global ids held here (default: all E); a scale of all experts is cut to them.
    Two columns are gate and up: they must agree here; `merge_gate_up` requantises weights that do not.
    """
    pairs = gate_up_columns(scale, name=name, num_experts=num_experts, experts=experts)
    differs = (pairs[:, 0] != pairs[:, 1]).nonzero()
    if len(differs):
        local = int(differs[0])
        gate, up = pairs[local].tolist()
        raise ScaleError(
            f"gate and up scales of expert {(experts or range(num_experts))[local]} differ ({gate:g} and "
            f"{up:g}), and {len(differs)} of {len(pairs)} experts are so; requantise both to one scale",
            name=name,
            scale=scale,
        )
    return pairs[:, 0].contiguous()


def input_scale(scale: Tensor | None, *, name: str, num_experts: int, experts: range | None = None) -> Tensor:
    """As `per_expert`, for an activation: of gate and up columns the larger counts.

    Both multiply the same activation, which is quantised once; the larger scale covers both ranges.
    """
    pairs = gate_up_columns(scale, name=name, num_experts=num_experts, experts=experts)
    return pairs.amax(dim=1)


def gate_up_columns(
    scale: Tensor | None, *, name: str, num_experts: int, experts: range | None = None
) -> Tensor:
    """float32 [len(experts), 2]: the checked scale, one column for gate and one for up."""
    experts = range(num_experts) if experts is None else experts
    if scale is None:
        raise ScaleError(
            "is missing; without it the values have no magnitude, and 1 would be a guess",
            name=name,
            scale=None,
        )
    values = scale.float()
    if scale.ndim == 0 or scale.shape == (1,):
        values = values.reshape(1, 1).expand(len(experts), 2)
    elif scale.ndim == 1:
        values = values[:, None].expand(-1, 2)
    elif scale.ndim != 2 or scale.shape[1] != 2:
        raise _wrong_shape(scale, name, num_experts, experts)
    if len(values) == num_experts:
        values = values[experts.start : experts.stop]
    if len(values) != len(experts):
        raise _wrong_shape(scale, name, num_experts, experts)
    bad = ~(torch.isfinite(values) & (values > 0)).all(dim=1)
    if bad.any():
        local = int(bad.nonzero()[0])
        raise ScaleError(
            f"scales must be finite and positive, but expert {experts[local]} has {values[local].tolist()}",
            name=name,
            scale=scale,
        )
    return values


def merge_gate_up(gate: PackedTensor, up: PackedTensor) -> PackedTensor:
    """NVFP4 gate and up [..., I, K] stacked to W1 [..., 2I, K] with one global scale per expert.

    Where the two global scales differ, the smaller half is requantised to the larger scale: its block
    scales absorb the ratio. That costs the rounding of the new e4m3 block scale, at most 1/16 of each
    value while the block scale stays normal; dropping a scale would be wrong by the whole ratio.
    """
    gate_scale, up_scale = _global_scale(gate), _global_scale(up)
    shared = torch.maximum(gate_scale, up_scale)
    halves = (_requantize(gate, shared), _requantize(up, shared))
    return PackedTensor(
        format=Format.NVFP4,
        data=torch.cat([h.data for h in halves], dim=-2),
        scale=torch.cat([_block_scale(h).view(torch.uint8) for h in halves], dim=-2).view(fp8.DTYPE),
        global_scale=shared,
    )


@dataclass(frozen=True, kw_only=True)
class ActivationScales:
    """What W4A4 kernels take, all float32. GEMM n quantises its input with `a`, scales its sum by `alpha`.

    s1, s2, a1, a2: scalars; alpha1, alpha2: [E_loc]

    s are input scales as checkpoints hold them, `a = 1 / s`, and `alpha = w_2 * s`.
    """

    s1: Tensor
    s2: Tensor
    a1: Tensor
    a2: Tensor
    alpha1: Tensor
    alpha2: Tensor


def resolve(weights: ExpertWeights, *, layer: str = "experts") -> ActivationScales:
    """One scale for the inputs of each GEMM: the largest of ALL experts of the layer, whoever holds them.

    So every rank quantises alike, whatever the batch's layout and however experts are spread over ranks, and
    a token is quantised once, before it is routed. As vLLM, SGLang and ModelOpt do it; docs/formats.md says
    which of them where, and why the largest costs nothing.
    """
    given = weights.input_scales
    s1, s2 = (
        input_scale(scale, name=f"{layer} input_scale of {gemm}", num_experts=weights.num_experts).amax()
        for gemm, scale in (("w13", given.w13 if given else None), ("w2", given.w2 if given else None))
    )
    w1, w2 = weight_scales(weights, layer=layer)
    a1, a2 = (1.0 / s.clamp(min=SMALLEST) for s in (s1, s2))
    return ActivationScales(
        s1=s1,
        s2=s2,
        a1=a1,
        a2=a2,
        alpha1=w1 / a1.clamp(min=SMALLEST),
        alpha2=w2 / a2.clamp(min=SMALLEST),
    )


def weight_scales(weights: ExpertWeights, *, layer: str = "experts") -> tuple[Tensor, Tensor]:
    """float32 [E_loc] each: the global scales of w13 and w2, all that W4A16 kernels take."""
    first = weights.first_expert
    w1, w2 = (
        per_expert(
            packed.global_scale,
            name=f"{layer} global scale of {gemm}",
            num_experts=weights.num_experts,
            experts=range(first, first + weights.num_local_experts),
        )
        for gemm, packed in (("w13", weights.w13), ("w2", weights.w2))
    )
    return w1, w2


def _wrong_shape(scale: Tensor, name: str, num_experts: int, experts: range) -> ScaleError:
    counts = sorted({num_experts, len(experts)}, reverse=True)
    accepted = ", ".join(["a scalar", *(f"[{n}]" for n in counts), *(f"[{n}, 2]" for n in counts)])
    return ScaleError(f"accepted shapes are {accepted}", name=name, scale=scale)


def _requantize(packed: PackedTensor, shared: Tensor) -> PackedTensor:
    """`packed` [..., N, K] with global scale `shared` [...]; untouched where it has that already."""
    own = _global_scale(packed)
    if torch.equal(own, shared):
        return packed
    old = _block_scale(packed)
    ratio = (own / shared)[..., None, None]
    new = fp8.saturate((old.float() * ratio).clamp(min=nvfp4.SMALLEST_SCALE))
    # Codes move only where the new scale left e4m3's normal range; elsewhere they round to themselves.
    step = (new.float() * shared[..., None, None]).unsqueeze(-1)
    value = packed.decode().unflatten(-1, (-1, nvfp4.GROUP)) / step
    return replace(packed, data=e2m1.pack(e2m1.encode(value.flatten(-2))), scale=new, global_scale=shared)


def _global_scale(packed: PackedTensor) -> Tensor:
    assert packed.global_scale is not None, "nvfp4 weights carry a global scale"
    return packed.global_scale.float()


def _block_scale(packed: PackedTensor) -> Tensor:
    assert packed.scale is not None, "nvfp4 weights carry block scales"
    return packed.scale
