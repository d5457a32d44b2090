"""What the Blackwell runners hand to FlashInfer, decoded and computed, against the oracle.

No Blackwell is at hand: tests/moe/flashinfer_contract.py says what stands in for it, and what it checks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.moe.build import ACTIVATIONS, make_experts
from tests.moe.flashinfer_contract import Launches, library
from turnout.formats.experts import ExpertWeights
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.plan import MoEPlan, PhasePlan
from turnout.moe.reference import experts_reference
from turnout.moe.spec import MoESpec
from turnout.registry import RUNNERS

CPU = torch.device("cpu")
BOUND = 1e-3


def spec_of(activation: str = "silu", **sizes: int) -> MoESpec:
    given = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 3} | sizes
    return MoESpec(activation=ACTIVATIONS[activation], format="nvfp4", quantized_activations=True, **given)


def plan_of(
    spec: MoESpec, runner: str, experts: ExpertWeights, *, layouts=("tokens", "tokens"), activation="nvfp4"
):
    prefill, decode = (
        PhasePlan(
            phase=phase,
            runner=runner,
            dispatcher="none",
            layout=layout,
            wire_format="bf16",
            reduce="none",
            max_tokens=64,
        )
        for phase, layout in zip(("prefill", "decode"), layouts, strict=True)
    )
    return MoEPlan(
        prefill=prefill,
        decode=decode,
        activation_format=activation,
        weight_storage="packed",
        compute_dtype="bfloat16",
        first_expert=experts.first_expert,
        num_local_experts=experts.num_local_experts,
        weight_bytes=0,
        workspace_bytes=0,
        dispatch_bytes=0,
    )


def tokens_of(spec: MoESpec, T: int, *, padding: int = 0, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(T, spec.hidden_size, generator=draw).bfloat16()
    ids_TK = torch.stack([torch.randperm(spec.num_experts, generator=draw)[: spec.top_k] for _ in range(T)])
    weights_TK = torch.rand(T, spec.top_k, generator=draw)
    ids_TK[:padding], weights_TK[:padding] = -1, 0
    return x_TH, ids_TK.int(), weights_TK


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.float() - expected).norm() / expected.norm()).item()


def run(runner, batch) -> tuple[Tensor, Launches]:
    with library() as launches:
        return runner(batch), launches


def made(spec: MoESpec, name: str, experts: ExpertWeights, **plan):
    with library():
        runner = RUNNERS.get(name)(spec, plan_of(spec, name, experts, **plan), CPU)
        runner.prepare(experts)
    return runner


@pytest.mark.parametrize("name", ["flashinfer_cutedsl", "flashinfer_trtllm"])
def test_first(name):
    spec = spec_of()
    experts = make_experts(spec)
    x, ids, weights = tokens_of(spec, 17, padding=2)
    runner = made(spec, name, experts)
    out, launches = run(runner, TokensBatch(hidden=Hidden(data=x), topk_ids=ids, topk_weights=weights))
    expected = experts_reference(x, ids, weights, experts, spec.activation, activation_format="nvfp4")
    assert error(launches.result, expected) < BOUND
    assert error(out, expected) < 4e-3
