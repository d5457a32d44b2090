"""spec + topology + budget + hardware + wishes -> plan, or all the reasons why not.

Every runner is tried with every dispatcher of each phase, every activation format and every weight
storage. A combination is joined by what its parts declare (capability.py), never by their names. What
cannot run is a refusal; refusals are collected, all of them, and kept in the plan or raised together.
`auto` takes the best of what is allowed; a wish is honoured or refused, never replaced.

Both phases share one runner, because weights are prepared once, in its layout. Dispatchers may differ.

Four choices of `auto` that are not a backend's preference:

* Runner: where `turnout tune` has measured some of those allowed (measured.py), the one that takes the least
  time in the mean over batch sizes.
* Dispatchers: where tokens are gathered though fewer than a fourth of the expert-parallel ranks hold an
  expert that a token chose (SPARSE; 1 - (1 - 1/ep)^k, routed evenly), an all-to-all comes first: it moves
  less than a fourth of the bytes, which pays for telling everyone the counts. Top-8 over 32 ranks: 0.22.
* Activations: the checkpoint's own format if the device multiplies it natively, else bf16 (weight-only).
  Emulated W4A4 costs accuracy and gains no speed, so it runs only when asked for.
* Weight storage: decoded once when that takes no more bytes than packed, or on a CPU when it is small
  (DECODE_ONCE_BYTES, and a DECODE_ONCE_SHARE-th of memory). On one AVX2 core, unpacking a 1024 x 1024
  NVFP4 matrix takes 1.0 ms, its float32 product with one token 0.085 ms, with 16 tokens 0.65 ms: decoding
  at each use would dominate. GPU kernels unpack on the fly, and reading fewer bytes is what makes them
  fast, so there packed weights are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from turnout.moe.backends import DISPATCHER_CAPABILITIES, RUNNER_CAPABILITIES
from turnout.moe.budget import Budget, gigabytes
from turnout.moe.candidates import Candidate, search
from turnout.moe.capability import (
    DispatcherCapability,
    PlanRefused,
    Refusal,
    RunnerCapability,
    layer_refusals,
)
from turnout.moe.case import PHASES, Case, Wishes
from turnout.moe.proven import evidence
from turnout.moe.spec import MoESpec
from turnout.moe.tiling import tuned
from turnout.moe.tiling.tiles import ExpertShape, TileTable
from turnout.moe.workspace import shape_of
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology

__all__ = ["PHASES", "MoEPlan", "PhasePlan", "Wishes", "plan"]

C = TypeVar("C", RunnerCapability, DispatcherCapability)

# Names that flags may ask for, here or in other releases: what is missing is told from a typing error.
KNOWN_RUNNERS = (
    "triton",
    "flashinfer_cutedsl",
    "flashinfer_mxfp4",
    "flashinfer_cutlass",
    "flashinfer_trtllm",
)
KNOWN_DISPATCHERS = ("collective", "collective-experts", "nvlink", "flashinfer", "deepep")


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """Who does what in one phase ("prefill" or "decode")."""

    phase: str
    runner: str
    dispatcher: str
    layout: str  # "tokens" or "experts"
    wire_format: str  # "bf16", "fp8", "nvfp4"
    reduce: str  # who owes the sum over ranks: "none", "layer"
    max_tokens: int  # the largest batch the runner sees on this rank


@dataclass(frozen=True, kw_only=True)
class MoEPlan:
    """How every MoE layer of one model runs on this rank."""

    prefill: PhasePlan
    decode: PhasePlan
    activation_format: str  # what the GEMMs multiply with: "bf16", "fp8" or "nvfp4"
    weight_storage: str  # "packed": decoded at each use; "decoded": once at load
    compute_dtype: str  # torch dtype name of hidden states: "float32", "bfloat16", "float16"
    first_expert: int
    num_local_experts: int
    weight_bytes: int  # of one layer on this rank, as stored for use
    workspace_bytes: int
    dispatch_bytes: int
    deterministic: bool = False  # a token's bits depend on nothing else in the batch
    # A shared expert's weights: "sharded" over all ranks, part of the sum that the layer owes in both phases,
    # or "whole", on the tokens of this rank.
    shared_expert: str = "whole"
    shared_expert_beside: bool = False  # computed on a stream of its own, while tokens travel (overlap.py)
    two_batches: bool = False  # large steps run as two micro-batches that take turns (underway.py)
    tiles: TileTable = ()  # how the Hopper kernels cut their GEMMs; empty: by rule (tiles.py)
    refused: tuple[Refusal, ...] = ()  # candidates that were considered and cannot run
    reasons: tuple[str, ...] = ()  # why each choice was made

    def phase(self, name: str) -> PhasePlan:
        return self.prefill if name == "prefill" else self.decode


def plan(
    spec: MoESpec,
    *,
    topology: Topology,
    budget: Budget,
    hardware: Hardware,
    wishes: Wishes = Wishes(),
    compute_dtype: str,
    num_layers: int = 1,
    stored_itemsize: int = 2,
    runners: Sequence[RunnerCapability] | None = None,
    dispatchers: Sequence[DispatcherCapability] | None = None,
    measured: Mapping[str, float] = MappingProxyType({}),
    tiles: Callable[[ExpertShape], TileTable] | None = None,
) -> MoEPlan:
    """How `num_layers` MoE layers like `spec` run on this rank.

    `stored_itemsize` is that of unquantised weights in the checkpoint, in bytes. `runners` and
    `dispatchers` default to those of this version. `measured`: us by runner (measured.py), which decide
    between runners that are left to `auto`. `tiles`: the table of a layer, for runners that are
    tiled; None: what is shipped for it and this device (tuned.py). Raises PlanRefused with everything that
    stands in the way, ValueError for a budget made for another number of data-parallel groups.
    """
    if budget.dp_size != topology.dp_size:
        raise ValueError(f"a budget for dp_size {budget.dp_size}, a topology of dp_size {topology.dp_size}")
    case = Case(
        spec=spec,
        topology=topology,
        budget=budget,
        hardware=hardware,
        wishes=wishes,
        compute_dtype=compute_dtype,
        stored_itemsize=stored_itemsize,
        num_layers=num_layers,
    )
    known_runners = list(RUNNER_CAPABILITIES.values()) if runners is None else runners
    known_dispatchers = list(DISPATCHER_CAPABILITIES.values()) if dispatchers is None else dispatchers
    candidates, refused = _allowed(case, known_runners, known_dispatchers)
    if wishes.runner == "auto":  # sorting is stable: candidates of a runner keep their order
        candidates.sort(key=lambda c: measured.get(c.runner.name, math.inf))
    best = candidates[0]
    prefill, decode = (_phase_plan(case, best, phase) for phase in PHASES)
    table = _tiles(case, best, tiles or partial(tuned.find, hardware=hardware))
    return MoEPlan(
        prefill=prefill,
        decode=decode,
        activation_format=best.activation,
        weight_storage=best.storage,
        compute_dtype=compute_dtype,
        first_expert=topology.expert_range(spec.num_experts).start,
        num_local_experts=case.num_local_experts,
        weight_bytes=best.weight_bytes,
        workspace_bytes=best.workspace_bytes,
        dispatch_bytes=best.dispatch_bytes,
        deterministic=wishes.deterministic,
        shared_expert="sharded" if prefill.reduce == decode.reduce == "layer" else "whole",
        shared_expert_beside=hardware.device == "cuda" and wishes.overlap_shared_expert,
        two_batches=wishes.two_batches,
        tiles=table,
        refused=tuple(refused),
        reasons=(*_reasons(case, best, candidates, measured), *_why_tiles(case, best, table)),
    )


def _allowed(
    case: Case, runners: Sequence[RunnerCapability], dispatchers: Sequence[DispatcherCapability]
) -> tuple[list[Candidate], list[Refusal]]:
    """At least one candidate, the best first, and why others cannot run. Raises PlanRefused."""
    misarranged = case.topology.refusals()
    impossible = [*misarranged, *case.budget.refusals()]
    if not misarranged:
        impossible += layer_refusals(case.spec, case.topology)
    wished_runners, no_runner = _wished("--moe-runner-backend", case.wishes.runner, runners, KNOWN_RUNNERS)
    wished_dispatchers, no_dispatcher = _wished_dispatchers(case.wishes, dispatchers)
    found = [*impossible, *no_runner, *no_dispatcher]
    if misarranged:  # what a rank would hold cannot be told
        raise PlanRefused("the ranks cannot be arranged as asked", found)
    candidates, refused = search(case, wished_runners, wished_dispatchers)
    if found or not candidates:
        hint = "" if impossible else _hint(case, runners, dispatchers)
        blocking = [] if candidates else refused  # while others can run, a candidate's refusal is no obstacle
        raise PlanRefused(f"no MoE backend can run this as asked{hint}", [*found, *blocking])
    return candidates, refused


def _wished_dispatchers(
    wishes: Wishes, here: Sequence[DispatcherCapability]
) -> tuple[list[DispatcherCapability], list[Refusal]]:
    """As `_wished`; the name of a family stands for its members, a mode for one of them."""
    mode = wishes.dispatcher_mode
    members = [d for d in here if mode == "auto" or d.mode in ("", mode)]
    family = [d for d in members if d.family and d.family == wishes.dispatcher]
    if family:
        return family, []
    return _wished("--moe-a2a-backend", wishes.dispatcher, members, KNOWN_DISPATCHERS)


def _wished(flag: str, wish: str, here: Sequence[C], known: tuple[str, ...]) -> tuple[list[C], list[Refusal]]:
    """The backends to consider, and a refusal if the one asked for is not `here`."""
    if wish == "auto":
        return list(here), []
    asked = [backend for backend in here if backend.name == wish]
    if asked:
        return asked, []
    names = ", ".join(backend.name for backend in here)
    limit = "not part of this version" if wish in known else "unknown"
    refusal = Refusal(
        who="plan",
        asked=f"{flag} {wish}",
        limit=f"{limit}, which has: {names}",
        remedy=f"use {flag} auto, or one of: {names}",
    )
    return [], [refusal]


def _hint(
    case: Case, runners: Sequence[RunnerCapability], dispatchers: Sequence[DispatcherCapability]
) -> str:
    """What `auto` would do, if the wishes alone stand in the way."""
    candidates, _ = search(replace(case, wishes=Wishes()), runners, dispatchers)
    if case.wishes == Wishes() or not candidates:
        return ""
    best = candidates[0]
    return f"; left to auto, runner {best.runner.name} with dispatcher {best.prefill.name} would"


def _tiles(case: Case, best: Candidate, find: Callable[[ExpertShape], TileTable]) -> TileTable:
    """Under --deterministic the rule alone: every machine then runs the same kernels."""
    if not best.runner.tiled or case.wishes.deterministic:
        return ()
    return find(
        shape_of(
            case.spec,
            num_local_experts=case.num_local_experts,
            expert_tp=case.topology.expert_tp,
            activations=best.activation,
        )
    )


def _phase_plan(case: Case, best: Candidate, phase: str) -> PhasePlan:
    dispatcher = best.dispatcher(phase)
    layer_owes = case.topology.tp_size > 1 and not case.moves(dispatcher)
    return PhasePlan(
        phase=phase,
        runner=best.runner.name,
        dispatcher=dispatcher.name,
        layout=dispatcher.layout,
        wire_format=best.wire[phase],
        reduce="layer" if layer_owes else "none",
        max_tokens=case.rows(dispatcher, phase),
    )


def _reasons(
    case: Case, best: Candidate, candidates: Sequence[Candidate], measured: Mapping[str, float]
) -> tuple[str, ...]:
    """Why each choice was made, one line each."""
    others = {c.runner.name: c.runner.preference for c in candidates}
    why = _why("--moe-runner-backend", case.wishes.runner, best.runner.name, others)
    if case.wishes.runner == "auto" and len(others) > 1 and best.runner.name in measured:
        why = _why_measured(best.runner.name, others, measured)
    elif case.wishes.runner == "auto" and len(others) > 1 and best.runner.grounds:
        why += f"; {best.runner.grounds}"
    lines = [f"runner {best.runner.name}: {why}"]
    same_runner = [c for c in candidates if c.runner is best.runner]
    for phase in PHASES:
        chosen = best.dispatcher(phase)
        why = _why_dispatcher(case, chosen, {c.dispatcher(phase) for c in same_runner})
        lines.append(f"{phase} dispatcher {chosen.name}: {why}")
        if case.moves(chosen):
            lines.append(f"{phase} tokens travel in {best.wire[phase]}: {_why_wire(case, best, phase)}")
    lines.append(f"activations {best.activation}: {_why_activation(case, best)}")
    lines.append(f"weights {best.storage}: {_why_storage(case, best)}")
    if case.wishes.deterministic:
        lines.append("the same bits in any company: asked for with --deterministic")
    if any(_phase_plan(case, best, phase).reduce == "layer" for phase in PHASES):
        lines.append("the layer sums over ranks: all hold the same tokens, and each a part of the experts")
    return (*lines, *_evidence(best))


def _evidence(best: Candidate) -> list[str]:
    """What speaks for each backend chosen, a line each."""
    lines = [f"runner {best.runner.name} {evidence(best.runner.name, best.runner.checked)}"]
    for chosen in (best.prefill, best.decode):
        lines.append(f"dispatcher {chosen.name} {evidence(chosen.name, chosen.checked)}")
    return list(dict.fromkeys(lines))


def _why(flag: str, wish: str, chosen: str, preferences: dict[str, int]) -> str:
    if wish != "auto":
        return f"asked for with {flag}"
    others = [name for name in preferences if name != chosen]
    if not others:
        return "the only one that can run this"
    ranked = ", ".join(f"{name} ({preferences[name]})" for name in others)
    return f"preference {preferences[chosen]}, before {ranked}"


def _why_dispatcher(case: Case, chosen: DispatcherCapability, allowed: set[DispatcherCapability]) -> str:
    crowding = {d.name for d in allowed if case.crowds(d)}
    alike = {d.name: d.preference for d in allowed if d.name not in crowding or chosen.name in crowding}
    why = _why("--moe-a2a-backend", case.wishes.dispatcher, chosen.name, dict(sorted(alike.items())))
    if case.wishes.dispatcher != "auto" or not crowding or chosen.name in crowding:
        return why
    gathering = ", ".join(sorted(crowding))
    return f"a token needs {case.reach:.0%} of the ranks, and {gathering} would bring it to all" + (
        f"; {why}" if len(alike) > 1 else ""
    )


def _why_wire(case: Case, best: Candidate, phase: str) -> str:
    if case.wishes.dispatch_format != "auto":
        return "asked for with --moe-dispatch-dtype"
    if best.wire[phase] == "bf16":
        return f"unquantised ({case.compute_dtype}), which costs no accuracy"
    if best.wire[phase] == best.activation:
        return "what the GEMMs multiply with; quantised before the wire, the values are the same"
    return "all that dispatcher and runner share"


def _why_measured(chosen: str, others: Iterable[str], measured: Mapping[str, float]) -> str:
    times = [
        f"{name} {measured[name]:.0f} us" if name in measured else f"{name}, not measured"
        for name in others
        if name != chosen
    ]
    return f"measured {measured[chosen]:.0f} us, mean over batch sizes, before {', '.join(times)}"


def _why_tiles(case: Case, best: Candidate, table: TileTable) -> list[str]:
    """A device that is only named has no table: nothing to say of it."""
    if not best.runner.tiled or not case.hardware.present:
        return []
    if table:
        sizes = ", ".join(str(tokens) for tokens, _ in table)
        return [f"tilings as measured on {case.hardware.name} for batches of {sizes} tokens"]
    if case.wishes.deterministic:
        return ["tilings by rule, the same on every machine, for --deterministic"]
    return ["tilings by rule: none were measured for this layer here; `turnout tune` does"]


def _why_activation(case: Case, best: Candidate) -> str:
    if case.wishes.activation_format != "auto":
        return "asked for with --moe-activation-dtype"
    if best.activation == "nvfp4":
        units = case.native_fp4 and best.runner.fp4_units
        return (
            "the checkpoint calibrated them, and FP4 units multiply them" if units else "all the runner takes"
        )
    if best.activation == "fp8":
        return "the checkpoint's own scheme, per token and 128 columns"
    if case.spec.format == "bf16":
        return "the checkpoint is not quantised"
    if not case.spec.quantized_activations:
        return "weight-only, as the checkpoint asks"
    if not case.hardware.has_fp4_units:
        return f"weight-only, for {case.hardware.name} has no FP4 units and emulating them gains no speed"
    return "weight-only, for the runner does not use the FP4 units"


def _why_storage(case: Case, best: Candidate) -> str:
    size = gigabytes(best.weight_bytes * case.num_layers)
    if case.wishes.weight_storage != "auto":
        return f"asked for with --moe-weight-storage; {size} for {case.num_layers} layers"
    packed = case.weight_bytes("packed")
    if best.storage == "packed":
        decoded = gigabytes(case.weight_bytes("decoded") * case.num_layers)
        return f"{size} for {case.num_layers} layers, where decoded once they would take {decoded}"
    if best.weight_bytes <= packed:
        return f"no larger than packed, {size} for {case.num_layers} layers"
    if case.decode_once():
        return f"{size} for {case.num_layers} layers is small, and unpacking at each use is slow on a CPU"
    return f"the only storage that can run this; {size} for {case.num_layers} layers"
