"""Runner "flashinfer_mxfp4": MXFP4 W4A16 on Hopper, by FlashInfer's CUTLASS kernels for mixed inputs.

One form for GPT-OSS (biases on both GEMMs, alpha, beta and limit of its SwiGLU, hidden size 2880 padded to
2944 on the way in and trimmed on the way out) and DeepSeek-V4 (a limit only; nothing to pad): a parameter
that a model does not have has the value that changes nothing. Rows and columns that pad are zero codes.

FlashInfer's own fp4_quantize and mxfp4_quantize are never called: on Hopper they return zeros without a word.

Legend: E experts, N rows, I intermediate, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.moe.backends.flashinfer import weights_cutlass
from turnout.moe.backends.flashinfer.declaration import MXFP4
from turnout.moe.backends.flashinfer.fused_moe import CutlassRunner, Prepared, biases


class FlashinferMxfp4Runner(CutlassRunner):
    """A `CutlassRunner` (fused_moe.py) of MXFP4 weights and bf16 activations on Hopper."""

    capability = MXFP4

    def _prepared(self, experts: ExpertWeights) -> Prepared:
        (_, H, I), gated = experts.w2.shape, self._spec.activation.gated
        hidden, inner = weights_cutlass.padded(H), weights_cutlass.padded(I)
        w13, s13 = experts.w13.data.to(self._device), _scales(experts.w13.scale, self._device)
        w2, s2 = experts.w2.data.to(self._device), _scales(experts.w2.scale, self._device)
        w13, s13 = (
            weights_cutlass.up_gate(x, gated=gated, multiple=weights_cutlass.MULTIPLE, fill=fill)
            for x, fill in ((w13, 0), (s13, weights_cutlass.ONE))
        )
        w13, s13 = (
            weights_cutlass.pad(w13, w13.shape[1], hidden // 2),
            weights_cutlass.pad(s13, s13.shape[1], hidden // 32),
        )
        w2, s2 = weights_cutlass.pad(w2, hidden, inner // 2), weights_cutlass.pad(s2, hidden, inner // 32)
        b13 = experts.b13
        if b13 is not None:
            b13 = weights_cutlass.up_gate(b13, gated=gated, multiple=weights_cutlass.MULTIPLE, dim=-1)
        b13, b2 = biases(experts, hidden, b13, self._device)
        return Prepared(
            w13=weights_cutlass.interleave_mxfp4(w13),
            w2=weights_cutlass.interleave_mxfp4(w2),
            inner=inner,
            scales=[weights_cutlass.fold_scales(s).contiguous().view(torch.int32) for s in (s13, s2)],
            options={"use_w4_group_scaling": True},
            b13=b13,
            b2=b2,
        )


def _scales(scale: Tensor | None, device: torch.device) -> Tensor:
    assert scale is not None, "mxfp4 weights carry scales"
    return scale.to(device)
