"""The canonical expert weights of one MoE layer: what checkpoints yield and runners prepare.

Whatever the file looked like (per expert or stacked, transposed, gate and up interleaved,
reciprocal scales), this is the form it is brought into, once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from turnout.formats.packed import PackedTensor


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
    def format(self) -> str:
        return self.w13.format

    @property
    def num_local_experts(self) -> int:
        return self.w13.data.shape[0]

    @property
    def nbytes(self) -> int:
        extra = [self.b13, self.b2]
        if self.input_scales is not None:
            extra += [self.input_scales.w13, self.input_scales.w2]
        return self.w13.nbytes + self.w2.nbytes + sum(t.nbytes for t in extra if t is not None)
