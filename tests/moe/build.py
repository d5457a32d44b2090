"""Layers for tests: specs, weights in every format, and plans, from a seed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from turnout.formats import codec, nvfp4
from turnout.formats.experts import ExpertWeights, InputScales
from turnout.formats.packed import PackedTensor
from turnout.moe.interface import DispatchSetup
from turnout.moe.plan import MoEPlan, PhasePlan
from turnout.moe.spec import Activation, MoESpec
from turnout.parallel.groups import SINGLE_RANK, Groups

MAX_TOKENS = 64  # the plans' budget

ACTIVATIONS = {
    "silu": Activation(),
    "swiglu": Activation(kind="swiglu", alpha=1.702, beta=1.0, limit=7.0),
    "swiglu-limit": Activation(kind="swiglu", limit=0.7),
    "relu2": Activation(kind="relu2"),
}


def make_spec(activation: str = "silu", format: str = "bf16", **fields) -> MoESpec:
    """Small, with sizes that every format can hold; GPT-OSS's activation comes with its biases."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_experts": 8, "top_k": 2}
    return MoESpec(
        activation=ACTIVATIONS[activation],
        expert_bias=activation == "swiglu",
        format=format,
        quantized_activations=format == "nvfp4",
        **(sizes | fields),
    )


def make_experts(spec: MoESpec, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> ExpertWeights:
    """All experts, in `spec.format`; `dtype` is that of unquantised weights."""
    draw = torch.Generator().manual_seed(seed)
    E, H, I = spec.num_experts, spec.hidden_size, spec.intermediate_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def weights(*shape: int) -> PackedTensor:
        plain = normal(*shape) * shape[-1] ** -0.5
        return (
            PackedTensor(format="bf16", data=plain.to(dtype))
            if spec.format == "bf16"
            else encode(plain, spec)
        )

    scales = None
    if spec.quantized_activations:  # unequal, as calibration leaves them; inputs reach about 5 sigma
        scales = InputScales(
            w13=(4 + 2 * torch.rand(E, generator=draw)) / nvfp4.GLOBAL_MAX,
            w2=(2 + 2 * torch.rand(E, generator=draw)) / nvfp4.GLOBAL_MAX,
        )
    return ExpertWeights(
        w13=weights(E, spec.w13_rows, H),
        w2=weights(E, H, I),
        b13=normal(E, spec.w13_rows) if spec.expert_bias else None,
        b2=normal(E, H) if spec.expert_bias else None,
        input_scales=scales,
        num_experts=E,
    )


def encode(plain: Tensor, spec: MoESpec) -> PackedTensor:
    return codec.encode(plain, spec.format)


def expert_slice(experts: ExpertWeights, first: int, count: int) -> ExpertWeights:
    """The experts of one EP rank."""
    held = slice(first, first + count)
    return replace(
        experts,
        w13=experts.w13[held],
        w2=experts.w2[held],
        b13=None if experts.b13 is None else experts.b13[held],
        b2=None if experts.b2 is None else experts.b2[held],
        first_expert=first,
    )


def make_plan(
    spec: MoESpec,
    *,
    runner: str = "torch",
    dispatcher: str = "none",
    layout: str = "tokens",
    activation_format: str = "bf16",
    weight_storage: str = "decoded",
    compute_dtype: str = "float32",
    first: int = 0,
    count: int | None = None,
    reduce: str = "none",
    shared_expert: str = "whole",
    max_tokens: int = MAX_TOKENS,
) -> MoEPlan:
    phases = {
        phase: PhasePlan(
            phase=phase,
            runner=runner,
            dispatcher=dispatcher,
            layout=layout,
            wire_format="bf16",
            reduce=reduce,
            max_tokens=max_tokens,
        )
        for phase in ("prefill", "decode")
    }
    return MoEPlan(
        **phases,
        activation_format=activation_format,
        weight_storage=weight_storage,
        compute_dtype=compute_dtype,
        first_expert=first,
        num_local_experts=spec.num_experts if count is None else count,
        shared_expert=shared_expert,
        weight_bytes=0,
        workspace_bytes=0,
        dispatch_bytes=0,
    )


def make_setup(
    spec: MoESpec,
    plan: MoEPlan,
    phase: str = "decode",
    *,
    groups: Groups = SINGLE_RANK,
    device: torch.device = torch.device("cpu"),
    input_scale: Tensor | None = None,
) -> DispatchSetup:
    return DispatchSetup(
        spec=spec, plan=plan, phase=phase, groups=groups, device=device, input_scale=input_scale
    )
