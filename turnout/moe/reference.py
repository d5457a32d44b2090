"""The oracle: what the experts of a layer compute, in plain torch and float32, one expert at a time.

Every runner is tested against this. It is slow and shares no code with them beyond the number formats.

Legend: T tokens, H hidden, I intermediate, k top-k, M tokens of one expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.formats import fp8, nvfp4
from turnout.formats.experts import ExpertWeights
from turnout.moe.spec import Activation
from turnout.vocabulary import ActivationKind, Format


def experts_reference(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    experts: ExpertWeights,
    activation: Activation,
    *,
    activation_format: Format = Format.BF16,
) -> Tensor:
    """float32 [T, H]: the weighted sum over those of each token's experts that `experts` holds.

    activation_format "nvfp4" quantises the input of both GEMMs (W4A4), each with the largest scale of all
    experts of the layer, held here or not. "fp8" quantises both per token and 128 columns (W8A8), with MXFP4
    weights per token (W4A8).
    """
    to_fp8 = fp8.fake_quantize_rows if experts.w13.format == Format.MXFP4 else fp8.fake_quantize
    out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
    for local in range(experts.num_local_experts):
        expert = experts.first_expert + local
        token_M, slot_M = (topk_ids_TK == expert).nonzero(as_tuple=True)
        if not len(token_M):
            continue
        x_MH = x_TH[token_M].float()
        if activation_format == Format.NVFP4:
            s1, s2 = _input_scales(experts)
            x_MH = nvfp4.fake_quantize(x_MH, s1)
        elif activation_format == Format.FP8:
            x_MH = to_fp8(x_MH)
        h_M = x_MH @ experts.w13[local].decode().T
        if experts.b13 is not None:
            h_M = h_M + experts.b13[local]
        a_MI = activate(h_M, activation)
        if activation_format == Format.NVFP4:
            a_MI = nvfp4.fake_quantize(a_MI, s2)
        elif activation_format == Format.FP8:
            a_MI = to_fp8(a_MI)
        y_MH = a_MI @ experts.w2[local].decode().T
        if experts.b2 is not None:
            y_MH = y_MH + experts.b2[local]
        out_TH.index_add_(0, token_M, y_MH * topk_weights_TK[token_M, slot_M, None])
    return out_TH


def activate(h: Tensor, activation: Activation) -> Tensor:
    """GEMM1's output [M, 2I], gate then up ([M, I] when not gated), to GEMM2's input [M, I]."""
    if activation.kind == ActivationKind.RELU2:
        return h.relu() ** 2
    gate, up = h.chunk(2, dim=-1)
    if activation.kind == ActivationKind.SILU:
        return gate * gate.sigmoid() * up
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * (activation.alpha * gate).sigmoid() * (up + activation.beta)


def _input_scales(experts: ExpertWeights) -> tuple[Tensor, Tensor]:
    scales = experts.input_scales
    assert scales is not None, "W4A4 needs the checkpoint's input scales"
    return scales.w13.max(), scales.w2.max()
