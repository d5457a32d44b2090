"""What a request and a checkpoint leave each backend to choose from, the best first, and why not the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from turnout.errors import Refusal, listed
from turnout.formats.spec import FORMATS
from turnout.moe.capabilities.capability import DispatcherCapability, RunnerCapability
from turnout.moe.capabilities.limits import OTHER_DISPATCHER
from turnout.moe.planning.backend_refusals import OTHER_RUNNER
from turnout.moe.planning.compatibility import compatibility_refusals
from turnout.moe.planning.problem import PHASES, PlanningProblem
from turnout.vocabulary import Exchange, Format, Phase, WeightStorage


def variance_refusals(
    problem: PlanningProblem, who: str, backend: RunnerCapability | DispatcherCapability, other: str
) -> list[Refusal]:
    """Why `who` cannot be deterministic, as the request wants. other: the remedy, another backend."""
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


def exchange_refusals(problem: PlanningProblem, dispatcher: DispatcherCapability) -> list[Refusal]:
    """Why this dispatcher cannot overlap batches, or return results in a format, as the request wants."""
    return _overlap_refusals(problem, dispatcher) + _combine_refusals(problem, dispatcher)


def _overlap_refusals(problem: PlanningProblem, dispatcher: DispatcherCapability) -> list[Refusal]:
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


def _combine_refusals(problem: PlanningProblem, dispatcher: DispatcherCapability) -> list[Refusal]:
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


def serving_by_phase(
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


def allowed_activations(
    problem: PlanningProblem, runner: RunnerCapability
) -> tuple[list[Format], list[Refusal]]:
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


def allowed_storages(
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


def allowed_feeders(
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
