"""The layer between ranks: one case per (dispatcher, formats, parallel layout), run by `run` on every rank.

Every rank draws the whole layer and everyone's tokens from the same seeds, takes its part of both, and
compares what the layer gives it with the float32 reference over all experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tests.moe.bounds import BOUNDS, relative_error
from tests.moe.build import MAX_TOKENS, expert_slice, make_experts, make_spec
from tests.ranks import Rank
from turnout.formats import fp8, nvfp4
from turnout.formats.experts import ExpertWeights, shard
from turnout.moe import MoELayer, plan
from turnout.moe.backends.torch.runner import TorchRunner
from turnout.moe.batch import TokensBatch
from turnout.moe.budget import Budget
from turnout.moe.capabilities.capability import DispatcherCapability
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.plan import MoEPlan, PlanRequest
from turnout.moe.reference import experts_reference
from turnout.moe.routing import route
from turnout.moe.spec import MoESpec
from turnout.parallel import hardware
from turnout.parallel.topology import Topology

LOCAL_DISPATCHERS = ("none", "collective", "collective-experts")
COUNTS = (0, MAX_TOKENS, 3, 17, 1)  # by data-parallel rank, in turn


@dataclass(frozen=True, kw_only=True)
class Case:
    """`dp`, `ep` and the number of ranks arrange the layer; `wire` is how tokens are asked to be sent.

    skewed: every token chooses experts of the last EP rank. back: how results are asked to be sent. capacity:
    tokens for which a rank's buffers are asked to be made, for prefill alone; 0: all of a step.
    """

    dispatcher: str
    world: int
    ep: int
    dp: int
    weights: str = "bf16"
    wire: str = "bf16"
    activation_format: str = "bf16"
    skewed: bool = False
    back: str = "auto"
    capacity: int = 0
    device: str = "cpu"
    shared_memory: bool = True  # else gloo, between CPUs

    @property
    def compute_dtype(self) -> str:
        return "float32" if self.device == "cpu" else "bfloat16"

    def declared(self) -> Sequence[DispatcherCapability] | None:
        """What there is to plan with; None: what this version declares."""
        return None

    @property
    def bound(self) -> float:
        if self.back == "fp8":
            return BOUNDS["fp8", "bfloat16"]
        return BOUNDS[self.activation_format, self.compute_dtype]

    @property
    def moves(self) -> bool:
        """Whether tokens leave their rank."""
        return self.dispatcher != "none" or self.dp > 1

    @property
    def spec(self) -> MoESpec:
        # 256: shards of 128, which every format can be cut into. Biases, to be added once each.
        return make_spec("swiglu", self.weights, intermediate_size=256)

    @property
    def topology(self) -> Topology:
        return Topology(tp_size=self.world, dp_size=self.dp, ep_size=self.ep, enable_dp_attention=self.dp > 1)

    def batches(self) -> list[list[int]]:
        """Tokens by data-parallel rank: smallest, then largest; idle next to busy; one; none at all."""
        cycled = [[COUNTS[(i + j) % len(COUNTS)] for i in range(self.dp)] for j in range(len(COUNTS))]
        return [[1] + [0] * (self.dp - 1), [MAX_TOKENS] * self.dp, *cycled, [0] * self.dp]

    def quick(self) -> list[list[int]]:
        return [self.batches()[i] for i in (0, 1, 4)]


def cases(dispatcher: str, ep: int, tp: int, **fields: Any) -> Iterator[Case]:
    """Everything that varies for one dispatcher on ep x tp ranks; formats with all groups apart."""
    world = ep * tp
    for dp in (d for d in range(1, world + 1) if world % d == 0):
        yield Case(dispatcher=dispatcher, world=world, ep=ep, dp=dp, **fields)
    apart = Case(dispatcher=dispatcher, world=world, ep=ep, dp=world, **fields)
    yield replace(apart, skewed=True)
    for weights in ("fp8", "nvfp4", "mxfp4"):
        yield replace(apart, weights=weights)
    yield replace(apart, weights="nvfp4", activation_format="nvfp4")
    if apart.moves:
        yield replace(apart, weights="mxfp4", wire="fp8")
        yield replace(apart, weights="nvfp4", wire="nvfp4")
        yield replace(apart, weights="nvfp4", activation_format="nvfp4", wire="nvfp4")
    declared = DISPATCHERS[dispatcher]
    if apart.device == "cuda" and "fp8" in declared.combine_formats:  # between CPUs: test_in_flight.py
        yield replace(apart, back="fp8")
        yield replace(apart, weights="mxfp4", wire="fp8", back="fp8")
    if apart.device == "cuda" and declared.in_chunks:
        yield replace(apart, capacity=24)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One batch on one rank: error against the reference, and whether a repetition gave the same bits."""

    case: Case
    phase: str
    tokens: Sequence[int]
    error: float
    bound: float
    repeats: bool
    rows: int  # the most the runner was given
    planned: int

    @property
    def good(self) -> bool:
        return self.error <= self.bound and self.repeats and self.rows <= self.planned


class Watched:
    """The torch runner, and how many rows it was given at most."""

    def __init__(self, spec: MoESpec, chosen: MoEPlan, device: torch.device) -> None:
        self._runner, self.rows = TorchRunner(spec, chosen, device), 0
        self.prepare, self.update = self._runner.prepare, self._runner.update

    def __call__(self, batch):
        rows = len(batch.topk_ids) if isinstance(batch, TokensBatch) else batch.hidden.data.shape[1]
        self.rows = max(self.rows, rows)
        return self._runner(batch)


def run(rank: Rank, some: Sequence[Case], thorough: bool = True) -> list[Finding]:
    torch.manual_seed(0)
    found = []
    for case in some:
        whole = case.weights == "bf16" and thorough
        found += run_case(rank, case, case.batches() if whole else case.quick())
    return found


def run_case(rank: Rank, case: Case, batches: Sequence[Sequence[int]]) -> list[Finding]:
    groups = rank.groups(case.device, shared_memory=case.shared_memory, dp_size=case.dp, ep_size=case.ep)
    topology, spec = groups.topology, case.spec
    device = torch.device(case.device, rank.number) if case.device == "cuda" else torch.device("cpu")
    dtype = getattr(torch, case.compute_dtype)
    chosen = planned(case, topology)
    experts, router_weight, router_bias = parameters(case)
    runner = Watched(spec, chosen, device)
    shared = topology.tp_size if chosen.shared_expert == "sharded" else 1
    layer = MoELayer(
        spec,
        chosen,
        router_weight=router_weight.to(device),
        router_bias=router_bias.to(device),
        experts=held(experts, topology),
        shared_expert=lambda x_TH: x_TH * (0.5 / shared),
        groups=groups,
        runner=runner,
    )
    found = []
    all_TH = inputs(MAX_TOKENS, topology.dp_rank, spec.hidden_size).to(dtype)
    all_ref_TH = reference(case, all_TH)
    for phase in ("prefill",) if case.capacity else ("prefill", "decode"):
        for tokens in batches:
            own = slice(tokens[topology.dp_rank])
            x_TH, ref_TH = all_TH[own].to(device), all_ref_TH[own]
            runner.rows = 0
            y_TH, again_TH = (layer(x_TH, phase, tokens).cpu() for _ in range(2))
            assert y_TH.dtype == dtype
            found.append(
                Finding(
                    case=case,
                    phase=phase,
                    tokens=tokens,
                    error=relative_error(y_TH, ref_TH),
                    bound=case.bound,
                    repeats=torch.equal(y_TH, again_TH),
                    rows=runner.rows,
                    planned=chosen.phase(phase).max_tokens,
                )
            )
    return found


def planned(case: Case, topology: Topology) -> MoEPlan:
    """The planner's own plan, so that what it says about sums, shared experts and bounds is tried too."""
    budget = Budget.from_limits(
        chunked_prefill_size=MAX_TOKENS,
        max_prefill_tokens=MAX_TOKENS,
        max_running_requests=case.capacity or MAX_TOKENS,
        dp_size=case.dp,
        max_dispatch_tokens_per_rank=case.capacity,
    )
    return plan(
        case.spec,
        topology=topology,
        budget=budget,
        hardware=hardware.named("cpu" if case.device == "cpu" else "h200"),
        request=PlanRequest(
            moe_runner_backend="torch",
            moe_a2a_backend=case.dispatcher,
            moe_dispatch_dtype=case.wire if case.moves else "auto",
            moe_combine_dtype=case.back,
            moe_activation_dtype=case.activation_format,
        ),
        compute_dtype=case.compute_dtype,
        dispatchers=case.declared(),
    )


def parameters(case: Case) -> tuple[ExpertWeights, Tensor, Tensor]:
    """All experts, router weight [E, H], router bias [E]."""
    draw = torch.Generator().manual_seed(9)
    E, held_by_one = case.spec.num_experts, case.spec.num_experts // case.ep
    bias_E = torch.zeros(E)
    if case.skewed:
        bias_E[:-held_by_one] = -1000  # those that are chosen keep logits near 0, which float32 has exactly
    return _experts(case.spec), torch.randn(E, case.spec.hidden_size, generator=draw), bias_E


@lru_cache(maxsize=2)
def _experts(spec: MoESpec) -> ExpertWeights:
    return make_experts(spec)


def held(experts: ExpertWeights, topology: Topology) -> ExpertWeights:
    """This rank's shards of its slice of the experts."""
    span = topology.expert_range(experts.num_experts)
    return shard(expert_slice(experts, span.start, len(span)), topology.expert_tp_rank, topology.expert_tp)


def inputs(tokens: int, dp_rank: int, hidden_size: int = 128) -> Tensor:
    return torch.randn(tokens, hidden_size, generator=torch.Generator().manual_seed(100 + dp_rank))


def reference(case: Case, x_TH: Tensor) -> Tensor:
    """float32 [T, H]: all experts on the hidden states as the wire leaves them, plus the shared expert."""
    spec = case.spec
    experts, router_weight, router_bias = parameters(case)
    logits_TE = torch.nn.functional.linear(x_TH.float(), router_weight, router_bias)
    ids_TK, weights_TK = route(logits_TE, spec.routing, spec.top_k)
    wired_TH = x_TH.float()
    if case.wire == "fp8":
        wired_TH = fp8.decode_activation(*fp8.encode_activation(wired_TH))
    if case.wire == "nvfp4":
        wired_TH = nvfp4.fake_quantize(wired_TH, experts.input_scales.w13.max())
    out_TH = experts_reference(
        wired_TH, ids_TK, weights_TK, experts, spec.activation, activation_format=case.activation_format
    )
    return out_TH + 0.5 * x_TH.float()
