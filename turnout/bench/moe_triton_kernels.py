"""A peer of the layer benchmark, where it is installed: OpenAI's triton_kernels, MXFP4 weights by bf16.

The library routes, sorts, multiplies and sums; it wants router logits, not routes. Those whose largest k give
a call's own routes and weights are made beforehand, so that nothing is timed that a model would not run.
Used as its callers do on Hopper: weights and scales in the library's Hopper layouts, no split of the inner
dimension, the activation fused into GEMM1, routing weights and the sum over pairs into GEMM2.

It is no package of its own: vLLM's wheels hold it (vllm/third_party/triton_kernels), to be put on the path.

Legend: T tokens, k top-k, E experts of all ranks, H hidden, I intermediate, N weight rows, K columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.bench.contender import Forward, Routes
from turnout.formats.experts import ExpertWeights
from turnout.formats.packed import PackedTensor
from turnout.moe.spec import Activation, MoESpec
from turnout.vocabulary import ActivationKind

FORMATS = ("mxfp4",)
NO_ROUTE = -60.0  # as a logit, next to logarithms of weights: never among the largest k


def refusal(spec: MoESpec) -> str:
    """Why the library does not run this layer; "" if it does."""
    if spec.top_k & (spec.top_k - 1):
        return f"triton_kernels routes to powers of two, not to {spec.top_k} experts"
    activation = spec.activation
    if activation.kind == ActivationKind.SWIGLU and (activation.beta != 1 or activation.limit is None):
        return "triton_kernels adds 1 to the second half of its clamped activation"
    return "" if activation.gated else f"triton_kernels has no {activation.kind}"


def routes(ids_TK: Tensor, weights_TK: Tensor, *, num_experts: int) -> Routes:
    """float32 logits [T, E] whose k largest, in a softmax, are these weights, which sum to 1; and nothing."""
    out_TE = torch.full((len(ids_TK), num_experts), NO_ROUTE, device=ids_TK.device)
    return out_TE.scatter_(1, ids_TK.long(), weights_TK.float().log()), weights_TK


def make(experts: ExpertWeights, spec: MoESpec, ranks: int) -> Forward:
    """forward(x [T, H], logits [T, E], unused) -> [T, H], of the experts of the first of `ranks`."""
    from triton_kernels.matmul_ogs import matmul_ogs
    from triton_kernels.matmul_ogs_details import opt_flags
    from triton_kernels.routing import routing

    opt_flags.update_opt_flags_constraints({"split_k": 1})
    w13, precision13 = _weights(experts.w13, gated=True)
    w2, precision2 = _weights(experts.w2, gated=False)
    b13 = None if experts.b13 is None else _in_turn(experts.b13.float()).contiguous()
    b2 = None if experts.b2 is None else experts.b2.float()
    activation = _activation(spec.activation)

    def forward(x_TH: Tensor, logits_TE: Tensor, _: Tensor) -> Tensor:
        sorted_pairs, gather, scatter = routing(logits_TE, spec.top_k, simulated_ep=ranks)
        h = matmul_ogs(
            x_TH, w13, b13, sorted_pairs, gather_indx=gather, precision_config=precision13,
            fused_activation=activation,
        )  # fmt: skip
        out: Tensor = matmul_ogs(
            h,
            w2,
            b2,
            sorted_pairs,
            scatter_indx=scatter,
            precision_config=precision2,
            gammas=sorted_pairs.gate_scal,
        )
        return out

    return forward


def _activation(activation: Activation) -> Any:
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation
    from triton_kernels.swiglu import swiglu_fn

    from turnout.kernels.hopper.pairs import silu_of_pairs

    if activation.kind == ActivationKind.SILU:
        return FusedActivation(FnSpecs("silu", silu_of_pairs, ()), (), 2)
    return FusedActivation(
        FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (activation.alpha, activation.limit), 2
    )


def _weights(weights: PackedTensor, *, gated: bool) -> tuple[Any, Any]:
    """[E, N, K] as the library's [E, K, N], and how it is to be read."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    assert weights.scale is not None, "mxfp4 weights carry scales"
    codes, scale = weights.data, weights.scale.view(torch.uint8)
    if gated:
        codes, scale = _in_turn(codes), _in_turn(scale)
    scale = F.pad(scale, (0, -scale.shape[-1] % 4))
    values, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    w = convert_layout(wrap_torch_tensor(codes.transpose(1, 2), dtype=FP4), values, **options)
    s = convert_layout(wrap_torch_tensor(scale.transpose(1, 2)), scales, **scale_options)
    return w, PrecisionConfig(weight_scale=s, flex_ctx=FlexCtx(rhs_data=InFlexData()))


def _in_turn(t: Tensor) -> Tensor:
    """[E, 2 I, ...] gate then up -> gate and up row by row."""
    gate, up = t.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2)
