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
from turnout.moe.planning.compatibility import pair_refusals, wire_format
from turnout.moe.planning.problem import PHASES, Case
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
    case: Case, runners: Sequence[RunnerCapability], dispatchers: Sequence[DispatcherCapability]
) -> tuple[list[Candidate], list[Refusal]]:
    """All that can run, the best first, and every reason why the rest cannot. Either may be empty."""
    working, refused = [], []
    dispatchers = [dispatcher.on(case.hardware) for dispatcher in dispatchers]
    for dispatcher in dispatchers:
        reasons = dispatcher_refusals(dispatcher, case.spec, case.topology, case.hardware, case.compute_dtype)
        reasons += _variance_refusals(case, f"dispatcher {dispatcher.name}", dispatcher, OTHER_DISPATCHER)
        reasons += _turn_refusals(case, dispatcher) + _return_refusals(case, dispatcher)
        refused += reasons
        if not reasons:
            working.append(dispatcher)
    serving, too_large = _serving(case, dispatchers)
    refused += too_large
    candidates = []
    for place, runner in enumerate(runners):
        own = runner_refusals(runner, case.spec, case.topology, case.hardware, case.compute_dtype)
        own += _variance_refusals(case, f"runner {runner.name}", runner, OTHER_RUNNER)
        activations, no_activation = _activations(case, runner)
        storages, no_storage = _storages(case, runner)
        feeders, no_feeder = _feeders(case, runner, dispatchers)
        refused += [*own, *no_activation, *no_storage, *no_feeder]
        if own:
            continue
        feeders = [(at, dispatcher) for at, dispatcher in feeders if dispatcher in working]
        prefills, decodes = ([(at, d) for at, d in feeders if d in serving[phase]] for phase in PHASES)
        for choice in product(enumerate(activations), enumerate(storages), prefills, decodes):
            candidate = _join(case, (place, runner), *choice)
            reasons = _layout_refusals(candidate) or _memory_refusals(case, candidate)
            if not reasons:
                candidates.append(candidate)
            elif candidate.prefill is candidate.decode:  # a mixture adds nothing to what either says
                refused += reasons
    return sorted(candidates, key=lambda c: c.order), list(dict.fromkeys(refused))


def _variance_refusals(
    case: Case, who: str, backend: RunnerCapability | DispatcherCapability, other: str
) -> list[Refusal]:
    if backend.batch_invariant or not case.wishes.deterministic:
        return []
    return [
        Refusal(
            who=who,
            asked="--deterministic",
            limit="what a token gets may depend on what else is in the batch",
            remedy=f"leave --deterministic out, or {other}",
        )
    ]


def _turn_refusals(case: Case, dispatcher: DispatcherCapability) -> list[Refusal]:
    if dispatcher.in_turns or not case.wishes.two_batches:
        return []
    return [
        Refusal(
            who=f"dispatcher {dispatcher.name}",
            asked="--enable-two-batch-overlap",
            limit="its buffers hold one batch at a time",
            remedy=f"leave --enable-two-batch-overlap out, or {OTHER_DISPATCHER}",
        )
    ]


def _return_refusals(case: Case, dispatcher: DispatcherCapability) -> list[Refusal]:
    wish, H = case.wishes.combine_format, case.spec.hidden_size
    if wish in ("auto", Format.BF16):
        return []
    back = Format(wish)
    if not case.moves(dispatcher):
        asked, limit = (
            f" with --dp-size {case.topology.dp_size}",
            "no result travels: every rank has them all",
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
            asked=f"--moe-combine-dtype {wish}{asked}",
            limit=limit,
            remedy=f"use --moe-combine-dtype auto, or {OTHER_DISPATCHER}",
        )
    ]


def _serving(
    case: Case, dispatchers: Sequence[DispatcherCapability]
) -> tuple[dict[Phase, list[DispatcherCapability]], list[Refusal]]:
    """Which dispatchers take steps as large as the budget's, by phase, and why the others do not."""
    serving: dict[Phase, list[DispatcherCapability]] = {phase: [] for phase in PHASES}
    refused = []
    for phase, dispatcher in product(PHASES, dispatchers):
        reasons = dispatcher.limits.phase_refusals(f"dispatcher {dispatcher.name}", phase, case.budget)
        if dispatcher.exchange == Exchange.ALL_TO_ALL:
            reasons += case.budget.refusals(in_chunks=dispatcher.in_chunks)
        refused += reasons
        if not reasons:
            serving[phase].append(dispatcher)
    return serving, refused


def _activations(case: Case, runner: RunnerCapability) -> tuple[list[Format], list[Refusal]]:
    """What this runner's GEMMs may multiply with, best first.

    The checkpoint's own format where it asks for it and both device and runner do it natively; else bf16.
    """
    wish = case.wishes.activation_format
    choices = [Format.BF16]
    if case.spec.format == Format.NVFP4:
        choices = (
            [Format.NVFP4, Format.BF16]
            if case.native_fp4 and runner.fp4_units
            else [Format.BF16, Format.NVFP4]
        )
    elif case.spec.format == Format.FP8:
        choices = [Format.FP8, Format.BF16] if runner.fp8_units else [Format.BF16, Format.FP8]
    allowed, refused = [], []
    for choice in choices if wish == "auto" else [Format(wish)]:
        refusal = _activation_refusal(case, runner, choice)
        if refusal is None:
            allowed.append(choice)
        else:
            refused.append(refusal)
    return allowed, refused


def _activation_refusal(case: Case, runner: RunnerCapability, choice: Format) -> Refusal | None:
    spec, who, asked = case.spec, f"runner {runner.name}", f"--moe-activation-dtype {choice}"
    inner, group = spec.intermediate_size // case.topology.expert_tp, FORMATS[Format.FP8].group
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


def _storages(case: Case, runner: RunnerCapability) -> tuple[list[WeightStorage], list[Refusal]]:
    """How this runner may keep the weights, best first."""
    wish = case.wishes.weight_storage
    if wish == "auto":
        unpacks = case.spec.format not in runner.fast_packed
        packed, decoded = WeightStorage.PACKED, WeightStorage.DECODED
        best_first = [decoded, packed] if unpacks and case.decode_once() else [packed, decoded]
        if case.weight_bytes(decoded) <= case.weight_bytes(packed) and decoded in runner.weight_storages:
            best_first = [decoded]  # nothing is gained by unpacking at each use
        return [s for s in best_first if s in runner.weight_storages], []
    if wish in runner.weight_storages:
        return [WeightStorage(wish)], []
    return [], [
        Refusal(
            who=f"runner {runner.name}",
            asked=f"--moe-weight-storage {wish}",
            limit=f"keeps weights {listed(runner.weight_storages)}",
            remedy=f"use --moe-weight-storage auto, or {OTHER_RUNNER}",
        )
    ]


def _feeders(
    case: Case, runner: RunnerCapability, dispatchers: Sequence[DispatcherCapability]
) -> tuple[list[tuple[int, DispatcherCapability]], list[Refusal]]:
    """The dispatchers that can feed this runner, each with its place in `dispatchers`."""
    feeders, refused = [], []
    for place, dispatcher in enumerate(dispatchers):
        reasons = pair_refusals(
            runner, dispatcher, case.spec, case.wishes.dispatch_format, dp_size=case.topology.dp_size
        )
        refused += reasons
        if not reasons:
            feeders.append((place, dispatcher))
    return feeders, refused


def _join(
    case: Case,
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
            case.spec,
            case.wishes.dispatch_format,
            activation,
            dp_size=case.topology.dp_size,
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
        weight_bytes=case.weight_bytes(storage, runner) * copies,
        workspace_bytes=max(
            runner.workspace(case.share(feeds[phase], phase, storage, activation)) for phase in PHASES
        ),
        dispatch_bytes=_dispatch_bytes(case, feeds, wire),
        order=(
            -runner.preference,
            runner_place,
            activation_place,
            storage_place,
            case.large_prefill_us(prefill, storage, wire[Phase.PREFILL]),
            case.crowds(prefill),
            Phase.PREFILL not in prefill.made_for,
            case.moves(prefill),
            -prefill.preference,
            prefill_place,
            case.crowds(decode),
            Phase.DECODE not in decode.made_for,
            case.moves(decode),
            -decode.preference,
            decode_place,
        ),
    )


def _dispatch_bytes(case: Case, feeds: dict[Phase, DispatcherCapability], wire: dict[Phase, Format]) -> int:
    """One dispatcher's buffers serve both phases; two have their own."""
    needed: dict[str, int] = {}
    for phase, dispatcher in feeds.items():
        if not case.moves(dispatcher):
            continue
        size = dispatcher.buffers(
            DispatchShare(
                spec=case.spec,
                layout=dispatcher.layout,
                rows=case.rows(dispatcher, phase),
                num_local_experts=case.num_local_experts,
                wire_format=wire[phase],
                combine_format=case.combine_format,
                itemsize=case.itemsize,
                ranks=case.topology.tp_size,
                batches=2 if case.wishes.two_batches else 1,
            )
        )
        needed[dispatcher.name] = max(size, needed.get(dispatcher.name, 0))
    return sum(needed.values())


def _needed(case: Case, candidate: Candidate) -> int:
    """Experts of all layers and the shared buffers; the rest of the model comes on top."""
    feeds = {phase: candidate.dispatcher(phase) for phase in PHASES}
    workspace = max(
        candidate.runner.workspace(case.share(feeds[phase], phase, candidate.storage, candidate.activation))
        for phase in PHASES
    )
    return candidate.weight_bytes * case.num_layers + workspace + _dispatch_bytes(case, feeds, candidate.wire)


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


def _memory_refusals(case: Case, candidate: Candidate) -> list[Refusal]:
    """What a rank needs against the whole device."""
    needed = _needed(case, candidate)
    if needed <= case.hardware.memory_bytes:
        return []
    experts = candidate.weight_bytes * case.num_layers

    def fits(smaller: Budget) -> bool:
        return _needed(replace(case, budget=smaller), candidate) <= case.hardware.memory_bytes

    remedies = sizes.fewer_tokens(case.budget, fits, in_chunks=candidate.prefill.in_chunks)
    if experts > needed // 2:
        packed = case.weight_bytes(WeightStorage.PACKED)
        if candidate.storage == WeightStorage.DECODED and packed < candidate.weight_bytes:
            remedies.append("use --moe-weight-storage packed")
        if case.spec.format == Format.BF16:
            remedies.append("convert the checkpoint with `turnout quantize`")
        if case.hardware.device == "cuda":  # ranks of a CPU share its memory
            remedies.append("divide the experts among more ranks (--tp-size)")
    remedies.append("take a device with more memory")
    dispatchers = " and ".join(sorted({candidate.prefill.name, candidate.decode.name}))
    return [
        Refusal(
            who=f"runner {candidate.runner.name} with dispatcher {dispatchers}",
            asked=f"experts of {case.num_layers} layers kept {candidate.storage} ({gigabytes(experts)}), "
            f"workspace {gigabytes(candidate.workspace_bytes)}, "
            f"dispatch buffers {gigabytes(candidate.dispatch_bytes)} for "
            f"{case.rows(candidate.prefill, Phase.PREFILL)} tokens",
            limit=f"{case.hardware.name} has {gigabytes(case.hardware.memory_bytes)}",
            remedy=", or ".join(remedies),
        )
    ]
