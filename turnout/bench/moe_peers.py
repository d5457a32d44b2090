"""The peers of the layer benchmark: each gives its contenders for a layer, none where it cannot run.

torch's grouped GEMM and transformers' implementations get decoded weights; triton_kernels takes part where it
is installed. A new peer is a function here, or in a file of its own, and an entry in PEERS.

Legend: T tokens, k top-k, P pairs, E local experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.bench.contender import Contender, Forward
from turnout.formats.experts import ExpertWeights
from turnout.moe.spec import Activation, MoESpec
from turnout.vocabulary import ActivationKind

TRANSFORMERS = ("eager", "grouped_mm", "batched_mm")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What a peer is to compute in `dtype`: with each of `sets`, the experts of the first of `ranks`."""

    spec: MoESpec
    sets: tuple[ExpertWeights, ...]
    ranks: int
    dtype: str


def torch_grouped_mm(layer: Layer) -> list[Contender]:
    dtype = getattr(torch, layer.dtype)
    forwards = tuple(grouped_mm(experts, layer.spec.activation, dtype) for experts in layer.sets)
    return [Contender(runner="torch grouped_mm", dtype=layer.dtype, forwards=forwards, peer=True)]


def grouped_mm(experts: ExpertWeights, activation: Activation, dtype: torch.dtype) -> Forward:
    """forward(x [T, H], ids [T, k], weights [T, k]) -> [T, H] in x's dtype, of the experts held.

    Pairs are sorted by expert, as any implementation on this function must; pairs of experts that other
    ranks hold go last, where no group reaches them. Routes stay on the device.
    """
    w13, w2 = experts.w13.decode(dtype), experts.w2.decode(dtype)
    b13, b2 = (None if b is None else b.to(dtype) for b in (experts.b13, experts.b2))
    first, E = experts.first_expert, len(w13)

    def forward(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        local_P = ids_TK.flatten() - first
        local_P = torch.where((local_P >= 0) & (local_P < E), local_P, E)
        expert_P, order_P = local_P.sort()
        ends_E = torch.searchsorted(expert_P, torch.arange(E, device=x_TH.device), right=True).int()
        token_P = order_P // ids_TK.shape[1]
        held_P1 = (expert_P < E)[:, None]
        h_PI = F.grouped_mm(x_TH[token_P], w13.transpose(1, 2), offs=ends_E)
        if b13 is not None:
            h_PI = h_PI + b13[expert_P.clamp(max=E - 1)]
        y_PH = F.grouped_mm(_activate(h_PI, activation), w2.transpose(1, 2), offs=ends_E)
        if b2 is not None:
            y_PH = y_PH + b2[expert_P.clamp(max=E - 1)]
        y_PH = y_PH * weights_TK.flatten()[order_P, None].to(dtype)
        return torch.zeros_like(x_TH).index_add_(0, token_P, y_PH.masked_fill(~held_P1, 0))

    return forward


def _activate(h: Tensor, activation: Activation) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    if activation.kind == ActivationKind.SILU:
        return F.silu(gate) * up
    limit = activation.limit
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def transformers_experts(layer: Layer) -> list[Contender]:
    """transformers' expert implementations, of whole layers without biases."""
    spec, kind = layer.spec, getattr(torch, layer.dtype)
    if layer.ranks > 1 or spec.expert_bias or spec.activation.kind != ActivationKind.SILU:
        return []
    from transformers import AutoConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=spec.hidden_size,
        moe_intermediate_size=spec.intermediate_size,
        num_experts=spec.num_experts,
        num_experts_per_tok=spec.top_k,
    )
    per_token = spec.top_k * 3 * spec.hidden_size * spec.intermediate_size * kind.itemsize

    def module(weights: ExpertWeights) -> Any:
        with torch.device("meta"):
            experts = Qwen3MoeExperts(config)
        for name, weight in (("gate_up_proj", weights.w13), ("down_proj", weights.w2)):
            setattr(experts, name, torch.nn.Parameter(weight.decode(kind), requires_grad=False))
        return experts

    def forward(experts: Any, implementation: str) -> Forward:
        def run(x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            config._experts_implementation = implementation
            out_TH: Tensor = experts(x_TH, ids_TK.long(), weights_TK.to(x_TH.dtype))
            return out_TH

        return run

    modules = [module(weights) for weights in layer.sets]
    return [
        Contender(
            runner=f"transformers {name}",
            dtype=layer.dtype,
            forwards=tuple(forward(experts, name) for experts in modules),
            gathered_bytes=per_token if name == "batched_mm" else 0,
            peer=True,
        )
        for name in TRANSFORMERS
    ]


def triton_kernels(layer: Layer) -> list[Contender]:
    """On a GPU, where OpenAI's kernels are installed."""
    on_gpu = layer.sets[0].w13.data.device.type == "cuda"
    if not on_gpu or layer.dtype != "bfloat16" or find_spec("triton_kernels") is None:
        return []
    from turnout.bench import moe_triton_kernels as library

    if layer.spec.format not in library.FORMATS:
        return []
    refusal = library.refusal(layer.spec)
    return [
        Contender(
            runner="triton_kernels",
            dtype=layer.dtype,
            forwards=()
            if refusal
            else tuple(library.make(experts, layer.spec, layer.ranks) for experts in layer.sets),
            routes=partial(library.routes, num_experts=layer.spec.num_experts),
            peer=True,
            refusal=refusal,
        )
    ]


PEERS: tuple[Callable[[Layer], list[Contender]], ...] = (
    torch_grouped_mm,
    transformers_experts,
    triton_kernels,
)
