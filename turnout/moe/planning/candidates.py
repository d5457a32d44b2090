"""Every combination of backends and choices for one layer: those that can run, and why the rest cannot.

A candidate is a runner, a dispatcher per phase, an activation format and a weight storage, joined by
what each declares (capability.py), never by names. Reasons are collected without stopping at the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from turnout.errors import Refusal, listed
from turnout.moe import budget as sizes
from turnout.moe.budget import Budget, gigabytes
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.capabilities.limits import OTHER_DISPATCHER
from turnout.moe.capabilities.rank_share import DispatchShare
from turnout.moe.planning.backend_refusals import OTHER_RUNNER, dispatcher_refusals, runner_refusals
from turnout.moe.planning.choices import (
    allowed_activations,
    allowed_feeders,
    allowed_storages,
    exchange_refusals,
    serving_by_phase,
    variance_refusals,
)
from turnout.moe.planning.compatibility import wire_format
from turnout.moe.planning.problem import PHASES, PlanningProblem
from turnout.vocabulary import Format, Phase, WeightStorage


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One combination that its parts allow."""

    runner: RunnerCapability
    prefill: DispatcherCapability
    decode: DispatcherCapability
    activation: Format
    storage: WeightStorage
    wire: dict[Phase, Format]
    weight_bytes: int  # of one layer
    workspace_bytes: int
    dispatch_bytes: int
    order: tuple[int, ...]  # `auto` takes the smallest

    def dispatcher(self, phase: Phase) -> DispatcherCapability:
        return self.prefill if phase == Phase.PREFILL else self.decode

    def rank_bytes(self, num_layers: int) -> int:
        """Experts of all layers and the shared buffers; the rest of the model comes on top."""
        return self.weight_bytes * num_layers + self.workspace_bytes + self.dispatch_bytes


def search(
    problem: PlanningProblem, runners: Sequence[RunnerCapability], dispatchers: Sequence[DispatcherCapability]
) -> tuple[list[Candidate], list[Refusal]]:
    """All that can run, the best first, and every reason why the rest cannot. Either may be empty."""
    working, refused = [], []
    dispatchers = [dispatcher.on(problem.hardware) for dispatcher in dispatchers]
    for dispatcher in dispatchers:
        reasons = dispatcher_refusals(
            dispatcher, problem.spec, problem.topology, problem.hardware, problem.compute_dtype
        )
        reasons += variance_refusals(problem, f"dispatcher {dispatcher.name}", dispatcher, OTHER_DISPATCHER)
        reasons += exchange_refusals(problem, dispatcher)
        refused += reasons
        if not reasons:
            working.append(dispatcher)
    serving, too_large = serving_by_phase(problem, dispatchers)
    refused += too_large
    candidates, sizes_of = [], _Sizes(problem)
    for place, runner in enumerate(runners):
        own = runner_refusals(runner, problem.spec, problem.topology, problem.hardware, problem.compute_dtype)
        own += variance_refusals(problem, f"runner {runner.name}", runner, OTHER_RUNNER)
        activations, no_activation = allowed_activations(problem, runner)
        storages, no_storage = allowed_storages(problem, runner)
        feeders, no_feeder = allowed_feeders(problem, runner, dispatchers)
        refused += [*own, *no_activation, *no_storage, *no_feeder]
        if own:
            continue
        feeders = [(at, dispatcher) for at, dispatcher in feeders if dispatcher in working]
        prefills, decodes = ([(at, d) for at, d in feeders if d in serving[phase]] for phase in PHASES)
        for choice in product(enumerate(activations), enumerate(storages), prefills, decodes):
            candidate = _join(sizes_of, (place, runner), *choice)
            wrong_layout = _layout_refusals(candidate)
            if not wrong_layout and candidate.rank_bytes(problem.num_layers) <= problem.hardware.memory_bytes:
                candidates.append(candidate)
            elif candidate.prefill is candidate.decode:  # a mixture adds nothing to what either says
                refused += wrong_layout or [_memory_refusal(sizes_of, candidate)]
    return sorted(candidates, key=lambda c: c.order), list(dict.fromkeys(refused))


class _Sizes:
    """What candidates for one problem need in bytes. Many share a part: each part's formula is asked once."""

    def __init__(self, problem: PlanningProblem):
        self.problem = problem
        self._workspaces: dict[tuple[str, str, Phase, WeightStorage, Format], int] = {}
        self._buffers: dict[tuple[str, Phase, Format], int] = {}
        self._wires: dict[tuple[str, str, Format], Format] = {}
        self._under: dict[Budget, _Sizes] = {}

    def under(self, budget: Budget) -> _Sizes:
        """Under another budget."""
        if budget not in self._under:
            self._under[budget] = _Sizes(replace(self.problem, budget=budget))
        return self._under[budget]

    def wire(self, runner: RunnerCapability, dispatcher: DispatcherCapability, activation: Format) -> Format:
        """The format of tokens on their way to the experts."""
        part = (runner.name, dispatcher.name, activation)
        if part not in self._wires:
            problem = self.problem
            self._wires[part] = wire_format(
                runner,
                dispatcher,
                problem.spec,
                problem.request.moe_dispatch_dtype,
                activation,
                dp_size=problem.topology.dp_size,
            )
        return self._wires[part]

    def workspace(
        self,
        runner: RunnerCapability,
        feeds: dict[Phase, DispatcherCapability],
        storage: WeightStorage,
        activation: Format,
    ) -> int:
        """Of the runner, for the larger of its phases."""
        found = 0
        for phase, dispatcher in feeds.items():
            part = (runner.name, dispatcher.name, phase, storage, activation)
            if part not in self._workspaces:
                share = self.problem.share(dispatcher, phase, storage, activation)
                self._workspaces[part] = runner.workspace(share)
            found = max(found, self._workspaces[part])
        return found

    def dispatch(self, feeds: dict[Phase, DispatcherCapability], wire: dict[Phase, Format]) -> int:
        """One dispatcher's buffers serve both phases; two have their own."""
        needed: dict[str, int] = {}
        for phase, dispatcher in feeds.items():
            if self.problem.moves(dispatcher):
                size = self._buffers_of(dispatcher, phase, wire[phase])
                needed[dispatcher.name] = max(size, needed.get(dispatcher.name, 0))
        return sum(needed.values())

    def _buffers_of(self, dispatcher: DispatcherCapability, phase: Phase, wire: Format) -> int:
        part = (dispatcher.name, phase, wire)
        if part not in self._buffers:
            problem = self.problem
            self._buffers[part] = dispatcher.buffers(
                DispatchShare(
                    shape=problem.shape,
                    layout=dispatcher.layout,
                    rows=problem.rows(dispatcher, phase),
                    wire_format=wire,
                    combine_format=problem.combine_format,
                    itemsize=problem.itemsize,
                    ranks=problem.topology.tp_size,
                    batches=2 if problem.request.enable_two_batch_overlap else 1,
                )
            )
        return self._buffers[part]


def _join(
    sizes_of: _Sizes,
    runner_at: tuple[int, RunnerCapability],
    activation_at: tuple[int, Format],
    storage_at: tuple[int, WeightStorage],
    prefill_at: tuple[int, DispatcherCapability],
    decode_at: tuple[int, DispatcherCapability],
) -> Candidate:
    """Each part comes with its place among the alternatives, which breaks ties of preference."""
    problem = sizes_of.problem
    (runner_place, runner), (activation_place, activation) = runner_at, activation_at
    (storage_place, storage), (prefill_place, prefill), (decode_place, decode) = (
        storage_at,
        prefill_at,
        decode_at,
    )
    feeds = {Phase.PREFILL: prefill, Phase.DECODE: decode}
    copies = 2 if runner.weights_per_layout and prefill.layout != decode.layout else 1
    wire = {phase: sizes_of.wire(runner, feeds[phase], activation) for phase in PHASES}
    return Candidate(
        runner=runner,
        prefill=prefill,
        decode=decode,
        activation=activation,
        storage=storage,
        wire=wire,
        weight_bytes=problem.weight_bytes(storage, runner) * copies,
        workspace_bytes=sizes_of.workspace(runner, feeds, storage, activation),
        dispatch_bytes=sizes_of.dispatch(feeds, wire),
        order=(
            -runner.preference,
            runner_place,
            activation_place,
            storage_place,
            problem.large_prefill_us(prefill, storage, wire[Phase.PREFILL]),
            problem.crowds(prefill),
            Phase.PREFILL not in prefill.made_for,
            problem.moves(prefill),
            -prefill.preference,
            prefill_place,
            problem.crowds(decode),
            Phase.DECODE not in decode.made_for,
            problem.moves(decode),
            -decode.preference,
            decode_place,
        ),
    )


def _needed(sizes_of: _Sizes, candidate: Candidate) -> int:
    """`Candidate.rank_bytes` under another budget."""
    feeds = {phase: candidate.dispatcher(phase) for phase in PHASES}
    return (
        candidate.weight_bytes * sizes_of.problem.num_layers
        + sizes_of.workspace(candidate.runner, feeds, candidate.storage, candidate.activation)
        + sizes_of.dispatch(feeds, candidate.wire)
    )


def _layout_refusals(candidate: Candidate) -> list[Refusal]:
    """Weight-only numerics in a layout for which the runner has no such kernel."""
    layouts = {candidate.prefill.layout, candidate.decode.layout}
    allowed = candidate.runner.weight_only_layouts
    if candidate.activation != Format.BF16 or layouts <= allowed:
        return []
    return [
        Refusal(
            who=f"runner {candidate.runner.name} with dispatcher {candidate.prefill.name}",
            asked=f"weights multiplied with bf16 in layout {candidate.prefill.layout!r}",
            limit=f"does so in layout {listed(allowed)}",
            remedy=f"use a calibrated checkpoint and --moe-activation-dtype auto, or {OTHER_DISPATCHER}",
        )
    ]


def _memory_refusal(sizes_of: _Sizes, candidate: Candidate) -> Refusal:
    """Why what a rank needs is more than the whole device has."""
    problem = sizes_of.problem
    needed = candidate.rank_bytes(problem.num_layers)
    experts = candidate.weight_bytes * problem.num_layers

    def fits(smaller: Budget) -> bool:
        return _needed(sizes_of.under(smaller), candidate) <= problem.hardware.memory_bytes

    remedies = sizes.fewer_tokens(problem.budget, fits, in_chunks=candidate.prefill.in_chunks)
    if experts > needed // 2:
        packed = problem.weight_bytes(WeightStorage.PACKED)
        if candidate.storage == WeightStorage.DECODED and packed < candidate.weight_bytes:
            remedies.append("use --moe-weight-storage packed")
        if problem.spec.format == Format.BF16:
            remedies.append("convert the checkpoint with `turnout quantize`")
        if problem.hardware.device == "cuda":  # ranks of a CPU share its memory
            remedies.append("divide the experts among more ranks (--tp-size)")
    remedies.append("take a device with more memory")
    dispatchers = " and ".join(sorted({candidate.prefill.name, candidate.decode.name}))
    return Refusal(
        who=f"runner {candidate.runner.name} with dispatcher {dispatchers}",
        asked=f"experts of {problem.num_layers} layers kept {candidate.storage} ({gigabytes(experts)}), "
        f"workspace {gigabytes(candidate.workspace_bytes)}, "
        f"dispatch buffers {gigabytes(candidate.dispatch_bytes)} for "
        f"{problem.rows(candidate.prefill, Phase.PREFILL)} tokens",
        limit=f"{problem.hardware.name} has {gigabytes(problem.hardware.memory_bytes)}",
        remedy=", or ".join(remedies),
    )
