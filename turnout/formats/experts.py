"""The canonical expert weights of one MoE layer: what checkpoints yield and runners prepare.

Whatever the file looked like (per expert or stacked, transposed, gate and up interleaved,
reciprocal scales), this is the form it is brought into, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnout.formats.packed import PackedTensor, equal_part
from turnout.vocabulary import Format


@dataclass(frozen=True, kw_only=True)
class InputScales:
    """NVFP4 activation scales as ModelOpt stores them (`amax / (6 * 448)`), over ALL global experts.

    w13: float32 [E], the scale of the layer's input; w2: float32 [E], of GEMM1's activated output.
    """

    w13: Tensor
    w2: Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """Experts `first_expert .. first_expert + E_loc` of `num_experts`.

    w13: [E_loc, 2I, H], gate rows first then up rows ([E_loc, I, H] when not gated)
    w2:  [E_loc, H, I]
    b13: float32 [E_loc, 2I] or None;  b2: float32 [E_loc, H] or None
    input_scales: present when an NVFP4 checkpoint asks for quantised activations (W4A4), else None
    """

    w13: PackedTensor
    w2: PackedTensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    input_scales: InputScales | None = None
    first_expert: int = 0
    num_experts: int

    @property
    def format(self) -> Format:
        return self.w13.format

    @property
    def num_local_experts(self) -> int:
        return self.w13.data.shape[0]

    def to(self, device: torch.device | str) -> ExpertWeights:
        """The same weights on `device`, biases and input scales with them."""
        scales = self.input_scales
        return replace(
            self,
            w13=self.w13.to(device),
            w2=self.w2.to(device),
            b13=None if self.b13 is None else self.b13.to(device),
            b2=None if self.b2 is None else self.b2.to(device),
            input_scales=scales and InputScales(w13=scales.w13.to(device), w2=scales.w2.to(device)),
        )

    @property
    def nbytes(self) -> int:
        extra = [self.b13, self.b2]
        if self.input_scales is not None:
            extra += [self.input_scales.w13, self.input_scales.w2]
        return self.w13.nbytes + self.w2.nbytes + sum(t.nbytes for t in extra if t is not None)


def shard(experts: ExpertWeights, index: int, count: int) -> ExpertWeights:
    """Part `index` of `count` of every expert's intermediate dimension; the outputs of all parts sum up.

    w13 keeps these rows of gate and of up, w2 these columns, b13 as w13. b2 and the input scales stay whole:
    a bias of the sum must be added by one part only. Weights are copied, so that the whole may be freed.
    Raises ValueError where a part would cut through a group of weights that share a scale.
    """
    if count == 1:
        return experts
    stacked = experts.w13.shape[-2] // experts.w2.shape[-1]  # gate and up, where gated
    b13 = experts.b13
    return replace(
        experts,
        w13=experts.w13.row_part(index, count, stacked=stacked),
        w2=experts.w2.column_part(index, count),
        b13=None if b13 is None else equal_part(b13, -1, index, count, stacked=stacked),
    )
