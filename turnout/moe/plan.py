"""spec + topology + budget + hardware + request -> plan, or all the reasons why not.

Every runner is tried with every dispatcher of each phase, every activation format and every weight
storage. A combination is joined by what its parts declare (capability.py), never by their names. What
cannot run is a refusal; refusals are collected, all of them, and kept in the plan or raised together.
`auto` takes the best of what is allowed; what was asked for is honoured or refused, never replaced.

Both phases share one runner, because weights are prepared once, in its layout. A second one may take
the batch sizes at which it was measured faster, where that is worth a second copy
(planning/runner_by_batch_size.py). Dispatchers may differ.

Four choices of `auto` that are not a backend's preference:

* Runner: where `turnout tune` has measured some of those allowed (planning/measured.py), the one that takes
  the least time in the mean over batch sizes.
* Dispatchers: where tokens are gathered though fewer than a fourth of the expert-parallel ranks hold an
  expert that a token chose (SPARSE; 1 - (1 - 1/ep)^k, routed evenly), an all-to-all comes first: it moves
  less than a fourth of the bytes, which pays for telling everyone the counts. Top-8 over 32 ranks: 0.22.
* Activations: the checkpoint's own format if the device multiplies it natively, else bf16 (weight-only).
  Emulated W4A4 costs accuracy and gains no speed, so it runs only when asked for.
* Weight storage: decoded once when that takes no more bytes than packed, or on a CPU when it is small
  (DECODE_ONCE_BYTES, and DECODE_ONCE_PART of memory). On one AVX2 core, unpacking a 1024 x 1024
  NVFP4 matrix takes 1.0 ms, its float32 product with one token 0.085 ms, with 16 tokens 0.65 ms: decoding
  at each use would dominate. GPU kernels unpack on the fly, and reading fewer bytes is what makes them
  fast, so there packed weights are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from turnout.errors import PlanRefused, Refusal
from turnout.moe.budget import Budget
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.capabilities.tuning import TuningTable
from turnout.moe.planning.candidates import Candidate, search
from turnout.moe.planning.problem import PHASES, PlanningProblem, PlanRequest
from turnout.moe.planning.reasons import layer_owes_sum, reasons, why_sibling, why_tuning
from turnout.moe.planning.runner_by_batch_size import BatchSizes, Times, means, second, why
from turnout.moe.planning.sharding_rules import layer_refusals
from turnout.moe.spec import MoESpec
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology
from turnout.vocabulary import (
    Bf16Units,
    ComputeDtype,
    Format,
    Layout,
    Phase,
    Reduce,
    SharedExpert,
    WeightStorage,
)

__all__ = ["PHASES", "MoEPlan", "PhasePlan", "PlanRequest", "Wishes", "plan"]

C = TypeVar("C", RunnerCapability, DispatcherCapability)

# The earlier names of PlanRequest's fields.
_RENAMED = {
    "runner": "moe_runner_backend",
    "dispatcher": "moe_a2a_backend",
    "dispatcher_mode": "deepep_mode",
    "dispatch_format": "moe_dispatch_dtype",
    "combine_format": "moe_combine_dtype",
    "activation_format": "moe_activation_dtype",
    "weight_storage": "moe_weight_storage",
    "two_batches": "enable_two_batch_overlap",
}


def Wishes(*, overlap_shared_expert: bool = True, **fields: Any) -> PlanRequest:
    """The earlier name of PlanRequest, with the earlier names of its fields."""
    renamed = {_RENAMED.get(name, name): value for name, value in fields.items()}
    return PlanRequest(**{"disable_shared_expert_overlap": not overlap_shared_expert} | renamed)


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """Who does what in one phase."""

    phase: Phase
    runner: str
    dispatcher: str
    layout: Layout
    wire_format: Format
    reduce: Reduce
    max_tokens: int  # the largest batch the runner sees on this rank
    combine_format: Format = Format.BF16  # of results on their way back; BF16: the compute dtype
    chunk: int = 0  # tokens of each data-parallel rank at a time (in_flight.py); 0: all of a step


@dataclass(frozen=True, kw_only=True)
class MoEPlan:
    """How every MoE layer of one model runs on this rank."""

    prefill: PhasePlan
    decode: PhasePlan
    activation_format: Format  # what the GEMMs multiply with
    weight_storage: WeightStorage
    compute_dtype: ComputeDtype
    first_expert: int
    num_local_experts: int
    weight_bytes: int  # of one layer on this rank, as stored for use
    workspace_bytes: int
    dispatch_bytes: int
    deterministic: bool = False  # a token's bits depend on nothing else in the batch
    bf16_units: Bf16Units = Bf16Units.NONE  # of a CPU, that runners may use
    shared_expert: SharedExpert = SharedExpert.WHOLE
    overlap_shared_expert: bool = False  # on a stream of its own, during dispatch and combine
    two_batches: bool = False  # large steps run as two micro-batches (in_flight.py)
    # The most tokens of a batch, and its runner; empty: the phases' runner computes all.
    runner_by_batch_size: BatchSizes = ()
    tiles: TuningTable = ()  # how a runner with tuned kernels cuts them; empty: by its rule
    draft: MoEPlan | None = None  # of a draft layer whose experts are in another format; None: as the others
    refused: tuple[Refusal, ...] = ()  # candidates that were considered and cannot run
    reasons: tuple[str, ...] = ()  # why each choice was made

    def phase(self, phase: Phase) -> PhasePlan:
        return self.prefill if phase == Phase.PREFILL else self.decode

    @property
    def parts(self) -> tuple[MoEPlan, ...]:
        """This, and the plan of a draft layer that has its own."""
        return (self,) if self.draft is None else (self, self.draft)

    @property
    def runners(self) -> tuple[str, ...]:
        """All that hold weights."""
        return tuple(dict.fromkeys((self.prefill.runner, *(name for _, name in self.runner_by_batch_size))))


def plan(
    spec: MoESpec,
    *,
    topology: Topology,
    budget: Budget,
    hardware: Hardware,
    request: PlanRequest = PlanRequest(),
    wishes: PlanRequest | None = None,
    compute_dtype: ComputeDtype,
    num_layers: int = 1,
    stored_itemsize: int = 2,
    runners: Sequence[RunnerCapability] | None = None,
    dispatchers: Sequence[DispatcherCapability] | None = None,
    measured: Times = MappingProxyType({}),
    tiles: TuningTable | None = None,
    tuning_folder: Path | None = None,
) -> MoEPlan:
    """How `num_layers` MoE layers like `spec` run on this rank.

    `request`: what the user asked for; `wishes` is its earlier name. `stored_itemsize` is that of unquantised
    weights in the checkpoint, in bytes. `runners` and `dispatchers` default to those of this version.
    `measured`: us by runner and batch size (measured.py), which decide between runners that are left to
    `auto`. `tiles`: the table of a runner with tuned kernels; None: this machine's own from `tuning_folder`,
    else what is shipped. Raises PlanRefused with everything that stands in the way, ValueError for a budget
    made for another number of data-parallel groups.
    """
    request = wishes or request
    if budget.dp_size != topology.dp_size:
        raise ValueError(f"a budget for dp_size {budget.dp_size}, a topology of dp_size {topology.dp_size}")
    problem = PlanningProblem(
        spec=spec, topology=topology, budget=budget, hardware=hardware, request=request,
        compute_dtype=compute_dtype, stored_itemsize=stored_itemsize, num_layers=num_layers,
    )  # fmt: skip
    known_runners = list(RUNNERS.values()) if runners is None else runners
    known_dispatchers = list(DISPATCHERS.values()) if dispatchers is None else dispatchers
    candidates, refused = _allowed(problem, known_runners, known_dispatchers)
    if request.moe_runner_backend == "auto":  # sorting is stable: candidates of a runner keep their order
        mean = means(measured)
        candidates.sort(key=lambda c: mean.get(c.runner.name, math.inf))
    best = candidates[0]
    added = second(problem, best, candidates, measured)
    together = [best] if added is None else [best, added[0]]
    tuned = next((one for one in together if one.runner.tuning is not None), best)
    table = _table(problem, tuned, tiles, tuning_folder)
    return replace(
        _made(problem, together),
        runner_by_batch_size=() if added is None else added[1],
        tiles=table,
        refused=tuple(refused),
        reasons=(
            *reasons(problem, best, candidates, means(measured)),
            *(() if added is None else why(best, *added, measured, num_layers)),
            *why_sibling(best, known_dispatchers, refused),
            *why_tuning(problem, tuned, table),
        ),
    )


def _made(problem: PlanningProblem, together: Sequence[Candidate]) -> MoEPlan:
    """What the first candidate does, with room for the weights and scratch of all."""
    best = together[0]
    prefill, decode = (_phase_plan(problem, best, phase) for phase in PHASES)
    owed = prefill.reduce == decode.reduce == Reduce.LAYER
    return MoEPlan(
        prefill=prefill,
        decode=decode,
        activation_format=best.activation,
        weight_storage=best.storage,
        compute_dtype=problem.compute_dtype,
        first_expert=problem.topology.expert_range(problem.spec.num_experts).start,
        num_local_experts=problem.num_local_experts,
        weight_bytes=sum(one.weight_bytes for one in together),
        workspace_bytes=sum(one.workspace_bytes for one in together),
        dispatch_bytes=best.dispatch_bytes,
        deterministic=problem.request.deterministic,
        bf16_units=problem.bf16_units,
        shared_expert=SharedExpert.SHARDED if owed else SharedExpert.WHOLE,
        overlap_shared_expert=problem.hardware.device == "cuda"
        and not problem.request.disable_shared_expert_overlap,
        two_batches=problem.request.enable_two_batch_overlap,
    )


def _allowed(
    problem: PlanningProblem, runners: Sequence[RunnerCapability], dispatchers: Sequence[DispatcherCapability]
) -> tuple[list[Candidate], list[Refusal]]:
    """At least one candidate, the best first, and why others cannot run. Raises PlanRefused."""
    misarranged = problem.topology.refusals()
    impossible = list(misarranged)
    if not misarranged:
        impossible += layer_refusals(problem.spec, problem.topology)
    requested_runners, no_runner = _requested(
        "--moe-runner-backend", problem.request.moe_runner_backend, runners
    )
    requested_dispatchers, no_dispatcher = _requested_dispatchers(problem.request, dispatchers)
    found = [*impossible, *no_runner, *no_dispatcher]
    too_many = problem.topology.expert_tp > problem.spec.intermediate_size
    if misarranged or too_many:  # what a rank would hold cannot be told
        found += problem.budget.refusals(in_chunks=any(d.in_chunks for d in requested_dispatchers))
        raise PlanRefused("the ranks cannot be arranged as asked", found)
    # In the place of a name that nothing has, all: what else stands in the way is told too.
    candidates, refused = search(problem, requested_runners or runners, requested_dispatchers or dispatchers)
    if not any(candidate.prefill.in_chunks for candidate in candidates):
        too_small = problem.budget.refusals()
        impossible, found = [*too_small, *impossible], [*too_small, *found]
    if found or not candidates:
        hint = "" if impossible else _hint(problem, runners, dispatchers)
        # While others can run, a candidate's refusal is no obstacle.
        blocking = [] if candidates else _obstacles(refused, requested_dispatchers or dispatchers)
        raise PlanRefused(
            f"no MoE backend can run this as asked{hint}", list(dict.fromkeys([*found, *blocking]))
        )
    return candidates, refused


def _obstacles(refused: Sequence[Refusal], dispatchers: Sequence[DispatcherCapability]) -> list[Refusal]:
    """`refused` without the refusals of some of the `dispatchers`, if others have none."""
    barred = {d.name for d in dispatchers if any(r.who == f"dispatcher {d.name}" for r in refused)}
    if len(barred) == len(dispatchers):
        return list(refused)
    return [r for r in refused if r.who.rpartition("dispatcher ")[2] not in barred]


def _requested_dispatchers(
    request: PlanRequest, here: Sequence[DispatcherCapability]
) -> tuple[list[DispatcherCapability], list[Refusal]]:
    """As `_requested`; the name of a family stands for its members, a mode for one of them."""
    mode = request.deepep_mode
    members = [d for d in here if mode == "auto" or d.mode in ("", mode)]
    family = [d for d in members if d.family and d.family == request.moe_a2a_backend]
    if family:
        return family, []
    return _requested("--moe-a2a-backend", request.moe_a2a_backend, members)


def _requested(flag: str, wanted: str, here: Sequence[C]) -> tuple[list[C], list[Refusal]]:
    """The backends to consider, and a refusal if the one asked for is not `here`."""
    if wanted == "auto":
        return list(here), []
    asked: list[C] = [backend for backend in here if backend.name == wanted or wanted in backend.aliases]
    if asked:
        return asked, []
    names = [backend.name for backend in here]
    close = get_close_matches(wanted, names, n=1)
    refusal = Refusal(
        who="plan",
        asked=f"{flag} {wanted}",
        limit=f"unknown; there are: {', '.join(names)}",
        remedy=f"use {flag} {close[0] if close else 'auto'}",
    )
    return [], [refusal]


def _hint(
    problem: PlanningProblem, runners: Sequence[RunnerCapability], dispatchers: Sequence[DispatcherCapability]
) -> str:
    """What `auto` would do, if only the request stands in the way."""
    candidates, _ = search(replace(problem, request=PlanRequest()), runners, dispatchers)
    if problem.request == PlanRequest() or not candidates:
        return ""
    best = candidates[0]
    return f"; left to auto, runner {best.runner.name} with dispatcher {best.prefill.name} would"


def _table(
    problem: PlanningProblem, best: Candidate, given: TuningTable | None, folder: Path | None
) -> TuningTable:
    """Under --deterministic only the rule: every machine then runs the same kernels."""
    tuning = best.runner.tuning
    if tuning is None or problem.request.deterministic:
        return ()
    if given is not None:
        return given
    share = problem.share(best.prefill, Phase.PREFILL, best.storage, best.activation)
    return tuning.find(share, problem.hardware, folder)


def _phase_plan(problem: PlanningProblem, best: Candidate, phase: Phase) -> PhasePlan:
    dispatcher = best.dispatcher(phase)
    return PhasePlan(
        phase=phase,
        runner=best.runner.name,
        dispatcher=dispatcher.name,
        layout=dispatcher.layout,
        wire_format=best.wire[phase],
        reduce=Reduce.LAYER if layer_owes_sum(problem, dispatcher) else Reduce.NONE,
        max_tokens=problem.rows(dispatcher, phase),
        combine_format=problem.combine_format,
        chunk=problem.budget.capacity if phase == Phase.PREFILL and problem.in_chunks(dispatcher) > 1 else 0,
    )
