"""Every combination of backends and choices for one layer: those that can run, and why the rest cannot.

A candidate is a runner, a dispatcher per phase, an activation format and a weight storage, joined by
what each declares (capability.py), never by names. Reasons are collected without stopping at the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from turnout.errors import Refusal, listed
from turnout.formats.spec import FORMATS
from turnout.moe import budget as sizes
from turnout.moe.budget import Budget, gigabytes
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.capabilities.limits import OTHER_DISPATCHER
from turnout.moe.capabilities.rank_share import DispatchShare
from turnout.moe.planning.backend_refusals import OTHER_RUNNER, dispatcher_refusals, runner_refusals
from turnout.moe.planning.compatibility import compatibility_refusals, wire_format
from turnout.moe.planning.problem import PHASES, PlanningProblem
from turnout.vocabulary import Exchange, Format, Phase, WeightStorage


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
        reasons += _variance_refusals(problem, f"dispatcher {dispatcher.name}", dispatcher, OTHER_DISPATCHER)
        reasons += _turn_refusals(problem, dispatcher) + _return_refusals(problem, dispatcher)
        refused += reasons
        if not reasons:
            working.append(dispatcher)
    serving, too_large = _serving(problem, dispatchers)
    refused += too_large
    candidates = []
    for place, runner in enumerate(runners):
        own = runner_refusals(runner, problem.spec, problem.topology, problem.hardware, problem.compute_dtype)
        own += _variance_refusals(problem, f"runner {runner.name}", runner, OTHER_RUNNER)
        activations, no_activation = _activations(problem, runner)
        storages, no_storage = _storages(problem, runner)
        feeders, no_feeder = _feeders(problem, runner, dispatchers)
        refused += [*own, *no_activation, *no_storage, *no_feeder]
        if own:
            continue
        feeders = [(at, dispatcher) for at, dispatcher in feeders if dispatcher in working]
        prefills, decodes = ([(at, d) for at, d in feeders if d in serving[phase]] for phase in PHASES)
        for choice in product(enumerate(activations), enumerate(storages), prefills, decodes):
            candidate = _join(problem, (place, runner), *choice)
            reasons = _layout_refusals(candidate) or _memory_refusals(problem, candidate)
            if not reasons:
                candidates.append(candidate)
            elif candidate.prefill is candidate.decode:  # a mixture adds nothing to what either says
                refused += reasons
    return sorted(candidates, key=lambda c: c.order), list(dict.fromkeys(refused))


def _variance_refusals(
    problem: PlanningProblem, who: str, backend: RunnerCapability | DispatcherCapability, other: str
) -> list[Refusal]:
    if backend.batch_invariant or not problem.request.deterministic:
        return []
    return [
        Refusal(
            who=who,
            asked="--deterministic",
            limit="what a token gets may depend on what else is in the batch",
            remedy=f"leave --deterministic out, or {other}",
        )
    ]


def _turn_refusals(problem: PlanningProblem, dispatcher: DispatcherCapability) -> list[Refusal]:
    if dispatcher.two_batch_overlap or not problem.request.enable_two_batch_overlap:
        return []
    return [
        Refusal(
            who=f"dispatcher {dispatcher.name}",
            asked="--enable-two-batch-overlap",
            limit="its buffers hold one batch at a time",
            remedy=f"leave --enable-two-batch-overlap out, or {OTHER_DISPATCHER}",
        )
    ]


def _return_refusals(problem: PlanningProblem, dispatcher: DispatcherCapability) -> list[Refusal]:
    wanted, H = problem.request.moe_combine_dtype, problem.spec.hidden_size
    if wanted in ("auto", Format.BF16):
        return []
    back = Format(wanted)
    if not problem.moves(dispatcher):
        asked, limit = (
            f" with --dp-size {problem.topology.dp_size}",
            "no result is sent: every rank has them all",
        )
    elif back not in dispatcher.combine_formats:
        asked, limit = "", f"brings results back in {listed(dispatcher.combine_formats)}"
    elif H % FORMATS[back].group:
        asked, limit = f" at hidden size {H}", f"{back} needs a multiple of {FORMATS[back].group}"
    else:
        return []
    return [
        Refusal(
            who=f"dispatcher {dispatcher.name}",
            asked=f"--moe-combine-dtype {wanted}{asked}",
            limit=limit,
            remedy=f"use --moe-combine-dtype auto, or {OTHER_DISPATCHER}",
        )
    ]


def _serving(
    problem: PlanningProblem, dispatchers: Sequence[DispatcherCapability]
) -> tuple[dict[Phase, list[DispatcherCapability]], list[Refusal]]:
    """Which dispatchers take steps as large as the budget's, by phase, and why the others do not."""
    serving: dict[Phase, list[DispatcherCapability]] = {phase: [] for phase in PHASES}
    refused = []
    for phase, dispatcher in product(PHASES, dispatchers):
        reasons = dispatcher.limits.phase_refusals(f"dispatcher {dispatcher.name}", phase, problem.budget)
        if dispatcher.exchange == Exchange.ALL_TO_ALL:
            reasons += problem.budget.refusals(in_chunks=dispatcher.in_chunks)
        refused += reasons
        if not reasons:
            serving[phase].append(dispatcher)
    return serving, refused


def _activations(problem: PlanningProblem, runner: RunnerCapability) -> tuple[list[Format], list[Refusal]]:
    """What this runner's GEMMs may multiply with, best first.

    The checkpoint's own format where it asks for it and both device and runner do it natively; else bf16.
    """
    wanted = problem.request.moe_activation_dtype
    choices = [Format.BF16]
    if problem.spec.format == Format.NVFP4:
        choices = (
            [Format.NVFP4, Format.BF16]
            if problem.native_fp4 and runner.fp4_units
            else [Format.BF16, Format.NVFP4]
        )
    elif problem.spec.format == Format.FP8:
        choices = [Format.FP8, Format.BF16] if runner.fp8_units else [Format.BF16, Format.FP8]
    allowed, refused = [], []
    for choice in choices if wanted == "auto" else [Format(wanted)]:
        refusal = _activation_refusal(problem, runner, choice)
        if refusal is None:
            allowed.append(choice)
        else:
            refused.append(refusal)
    return allowed, refused


def _activation_refusal(problem: PlanningProblem, runner: RunnerCapability, choice: Format) -> Refusal | None:
    spec, who, asked = problem.spec, f"runner {runner.name}", f"--moe-activation-dtype {choice}"
    inner, group = spec.intermediate_size // problem.topology.expert_tp, FORMATS[Format.FP8].group
    if choice == Format.NVFP4 and spec.format != Format.NVFP4:
        limit = f"W4A4 needs NVFP4 weights; the checkpoint's experts are {spec.format}"
        remedy = "use --moe-activation-dtype auto, or `turnout quantize MODEL OUT --format nvfp4`"
    elif choice == Format.NVFP4 and not spec.quantized_activations:
        limit = "W4A4 needs calibrated input scales, and the checkpoint holds none"
        remedy = (
            "use --moe-activation-dtype auto, or quantise from bf16 with "
            "`turnout quantize MODEL OUT --format nvfp4 --calibrate`"
        )
    elif choice == Format.FP8 and spec.format == Format.NVFP4:
        limit = (
            "an NVFP4 weight times its group's scale is no e4m3 number; rounded to one, results were off by "
            "6.5e-2, above the 5e-2 that FP8 is held to"
        )
        remedy = "use --moe-activation-dtype auto, or `turnout quantize MODEL OUT --format mxfp4` (W4A8)"
    elif choice == Format.FP8 and spec.format not in (Format.FP8, Format.MXFP4):
        limit = f"W8A8 needs FP8 weights, W4A8 MXFP4; the checkpoint's experts are {spec.format}"
        remedy = "use --moe-activation-dtype auto, or `turnout quantize MODEL OUT --format fp8`"
    elif choice == Format.FP8 and spec.format not in runner.fp8_weight_formats:
        limit = f"multiplies {listed(runner.fp8_weight_formats)} weights with FP8 activations"
        remedy = f"use --moe-activation-dtype auto, or {OTHER_RUNNER}"
    elif choice == Format.FP8 and spec.format == Format.FP8 and (spec.hidden_size % group or inner % group):
        limit = (
            f"W8A8 quantises {group} columns together, which hidden size {spec.hidden_size} and "
            f"this rank's intermediate size {inner} must be multiples of"
        )
        remedy = f"use --moe-activation-dtype bf16, or {OTHER_RUNNER}"
    elif choice == Format.BF16 and spec.format not in runner.weight_only_formats:
        limit = f"multiplies {spec.format} weights with {spec.format} activations only"
        remedy = f"use --moe-activation-dtype auto or {spec.format}, or {OTHER_RUNNER}"
    elif choice not in runner.activation_formats:
        limit = f"its GEMMs multiply with {listed(runner.activation_formats)}"
        remedy = f"use --moe-activation-dtype auto, or {OTHER_RUNNER}"
    else:
        return None
    return Refusal(who=who, asked=asked, limit=limit, remedy=remedy)


def _storages(
    problem: PlanningProblem, runner: RunnerCapability
) -> tuple[list[WeightStorage], list[Refusal]]:
    """How this runner may keep the weights, best first."""
    wanted = problem.request.moe_weight_storage
    if wanted == "auto":
        unpacks = problem.spec.format not in runner.fast_packed
        packed, decoded = WeightStorage.PACKED, WeightStorage.DECODED
        best_first = [decoded, packed] if unpacks and problem.decode_once() else [packed, decoded]
        if (
            problem.weight_bytes(decoded) <= problem.weight_bytes(packed)
            and decoded in runner.weight_storages
        ):
            best_first = [decoded]  # nothing is gained by unpacking at each use
        return [s for s in best_first if s in runner.weight_storages], []
    if wanted in runner.weight_storages:
        return [WeightStorage(wanted)], []
    return [], [
        Refusal(
            who=f"runner {runner.name}",
            asked=f"--moe-weight-storage {wanted}",
            limit=f"keeps weights {listed(runner.weight_storages)}",
            remedy=f"use --moe-weight-storage auto, or {OTHER_RUNNER}",
        )
    ]


def _feeders(
    problem: PlanningProblem, runner: RunnerCapability, dispatchers: Sequence[DispatcherCapability]
) -> tuple[list[tuple[int, DispatcherCapability]], list[Refusal]]:
    """The dispatchers that can feed this runner, each with its place in `dispatchers`."""
    feeders, refused = [], []
    for place, dispatcher in enumerate(dispatchers):
        reasons = compatibility_refusals(
            runner,
            dispatcher,
            problem.spec,
            problem.request.moe_dispatch_dtype,
            dp_size=problem.topology.dp_size,
        )
        refused += reasons
        if not reasons:
            feeders.append((place, dispatcher))
    return feeders, refused


def _join(
    problem: PlanningProblem,
    runner_at: tuple[int, RunnerCapability],
    activation_at: tuple[int, Format],
    storage_at: tuple[int, WeightStorage],
    prefill_at: tuple[int, DispatcherCapability],
    decode_at: tuple[int, DispatcherCapability],
) -> Candidate:
    """Each part comes with its place among the alternatives, which breaks ties of preference."""
    (runner_place, runner), (activation_place, activation) = runner_at, activation_at
    (storage_place, storage), (prefill_place, prefill), (decode_place, decode) = (
        storage_at,
        prefill_at,
        decode_at,
    )
    feeds = {Phase.PREFILL: prefill, Phase.DECODE: decode}
    copies = 2 if runner.weights_per_layout and prefill.layout != decode.layout else 1
    wire = {
        phase: wire_format(
            runner,
            feeds[phase],
            problem.spec,
            problem.request.moe_dispatch_dtype,
            activation,
            dp_size=problem.topology.dp_size,
        )
        for phase in PHASES
    }
    return Candidate(
        runner=runner,
        prefill=prefill,
        decode=decode,
        activation=activation,
        storage=storage,
        wire=wire,
        weight_bytes=problem.weight_bytes(storage, runner) * copies,
        workspace_bytes=max(
            runner.workspace(problem.share(feeds[phase], phase, storage, activation)) for phase in PHASES
        ),
        dispatch_bytes=_dispatch_bytes(problem, feeds, wire),
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


def _dispatch_bytes(
    problem: PlanningProblem, feeds: dict[Phase, DispatcherCapability], wire: dict[Phase, Format]
) -> int:
    """One dispatcher's buffers serve both phases; two have their own."""
    needed: dict[str, int] = {}
    for phase, dispatcher in feeds.items():
        if not problem.moves(dispatcher):
            continue
        size = dispatcher.buffers(
            DispatchShare(
                shape=problem.shape,
                layout=dispatcher.layout,
                rows=problem.rows(dispatcher, phase),
                wire_format=wire[phase],
                combine_format=problem.combine_format,
                itemsize=problem.itemsize,
                ranks=problem.topology.tp_size,
                batches=2 if problem.request.enable_two_batch_overlap else 1,
            )
        )
        needed[dispatcher.name] = max(size, needed.get(dispatcher.name, 0))
    return sum(needed.values())


def _needed(problem: PlanningProblem, candidate: Candidate) -> int:
    """Experts of all layers and the shared buffers; the rest of the model comes on top."""
    feeds = {phase: candidate.dispatcher(phase) for phase in PHASES}
    workspace = max(
        candidate.runner.workspace(
            problem.share(feeds[phase], phase, candidate.storage, candidate.activation)
        )
        for phase in PHASES
    )
    return (
        candidate.weight_bytes * problem.num_layers
        + workspace
        + _dispatch_bytes(problem, feeds, candidate.wire)
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


def _memory_refusals(problem: PlanningProblem, candidate: Candidate) -> list[Refusal]:
    """What a rank needs against the whole device."""
    needed = _needed(problem, candidate)
    if needed <= problem.hardware.memory_bytes:
        return []
    experts = candidate.weight_bytes * problem.num_layers

    def fits(smaller: Budget) -> bool:
        return _needed(replace(problem, budget=smaller), candidate) <= problem.hardware.memory_bytes

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
    return [
        Refusal(
            who=f"runner {candidate.runner.name} with dispatcher {dispatchers}",
            asked=f"experts of {problem.num_layers} layers kept {candidate.storage} ({gigabytes(experts)}), "
            f"workspace {gigabytes(candidate.workspace_bytes)}, "
            f"dispatch buffers {gigabytes(candidate.dispatch_bytes)} for "
            f"{problem.rows(candidate.prefill, Phase.PREFILL)} tokens",
            limit=f"{problem.hardware.name} has {gigabytes(problem.hardware.memory_bytes)}",
            remedy=", or ".join(remedies),
        )
    ]
