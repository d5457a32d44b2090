"""Why a plan is as it is: a line for each choice, for `turnout plan` and the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from turnout.errors import Refusal
from turnout.moe.budget import gigabytes
from turnout.moe.capabilities.capability import DispatcherCapability
from turnout.moe.capabilities.tuning import TuningTable
from turnout.moe.planning.candidates import Candidate
from turnout.moe.planning.hardware_evidence import evidence
from turnout.moe.planning.problem import PHASES, PlanningProblem
from turnout.vocabulary import Format, Phase, WeightStorage


def reasons(
    problem: PlanningProblem, best: Candidate, candidates: Sequence[Candidate], measured: Mapping[str, float]
) -> tuple[str, ...]:
    """Why each choice was made, one line each."""
    others = {c.runner.name: c.runner.preference for c in candidates}
    why = _why("--moe-runner-backend", problem.request.moe_runner_backend, best.runner.name, others)
    if problem.request.moe_runner_backend == "auto" and len(others) > 1 and best.runner.name in measured:
        why = _why_measured(best.runner.name, others, measured)
    elif problem.request.moe_runner_backend == "auto" and len(others) > 1 and best.runner.grounds:
        why += f"; {best.runner.grounds}"
    lines = [f"runner {best.runner.name}: {why}"]
    same_runner = [c for c in candidates if c.runner is best.runner]
    for phase in PHASES:
        chosen = best.dispatcher(phase)
        why = _why_dispatcher(problem, chosen, {c.dispatcher(phase) for c in same_runner})
        lines.append(f"{phase} dispatcher {chosen.name}: {why}")
        if problem.moves(chosen):
            lines.append(
                f"{phase} tokens are dispatched in {best.wire[phase]}: {_why_wire(problem, best, phase)}"
            )
    lines += _why_chunks(problem, best, same_runner)
    if problem.request.moe_combine_dtype != "auto":
        lines.append(f"results are combined in {problem.combine_format}: asked for with --moe-combine-dtype")
    lines.append(f"activations {best.activation}: {_why_activation(problem, best)}")
    lines.append(f"weights {best.storage}: {_why_storage(problem, best)}")
    if problem.request.deterministic:
        lines.append("batch-invariant: asked for with --deterministic")
    if any(layer_owes_sum(problem, best.dispatcher(phase)) for phase in PHASES):
        lines.append("the layer sums over ranks: all hold the same tokens, and each a part of the experts")
    return (*lines, *_evidence(best))


def layer_owes_sum(problem: PlanningProblem, dispatcher: DispatcherCapability) -> bool:
    """Where no token leaves its rank, no combine sums over ranks."""
    return problem.topology.tp_size > 1 and not problem.moves(dispatcher)


def _evidence(best: Candidate) -> list[str]:
    """What speaks for each backend chosen, a line each."""
    lines = [f"runner {best.runner.name} {evidence(best.runner.name, best.runner.checked)}"]
    for chosen in (best.prefill, best.decode):
        lines.append(f"dispatcher {chosen.name} {evidence(chosen.name, chosen.checked)}")
    return list(dict.fromkeys(lines))


def _why(flag: str, wanted: str, chosen: str, preferences: dict[str, int]) -> str:
    if wanted != "auto":
        return f"asked for with {flag}"
    others = [name for name in preferences if name != chosen]
    if not others:
        return "the only one that can run this"
    ranked = ", ".join(f"{name} ({preferences[name]})" for name in others)
    return f"preference {preferences[chosen]}, before {ranked}"


def _why_dispatcher(
    problem: PlanningProblem, chosen: DispatcherCapability, allowed: set[DispatcherCapability]
) -> str:
    if problem.request.moe_a2a_backend == "auto" and not problem.moves(chosen) and len(allowed) > 1:
        return "all ranks hold the same tokens, and nothing has to be dispatched"
    crowding = {d.name for d in allowed if problem.crowds(d)}
    alike = {d.name: d.preference for d in allowed if d.name not in crowding or chosen.name in crowding}
    why = _why("--moe-a2a-backend", problem.request.moe_a2a_backend, chosen.name, dict(sorted(alike.items())))
    if problem.request.moe_a2a_backend != "auto" or not crowding or chosen.name in crowding:
        return why
    gathering = ", ".join(sorted(crowding))
    return f"a token needs {problem.reach:.0%} of the ranks, and {gathering} would bring it to all" + (
        f"; {why}" if len(alike) > 1 else ""
    )


def _why_chunks(problem: PlanningProblem, best: Candidate, candidates: Sequence[Candidate]) -> list[str]:
    """Of prompts for which the buffers of some are too small, how they pass, and what that was weighed by."""
    found, chunks = [], problem.in_chunks(best.prefill)
    if chunks > 1:
        found.append(
            f"prefill passes in chunks of at most {problem.budget.capacity} tokens of a rank, "
            f"up to {chunks}: --max-dispatch-tokens-per-rank is less than a step"
        )
    weighed = {
        c.prefill.name: us
        for c in candidates
        if (us := problem.large_prefill_us(c.prefill, c.storage, c.wire[Phase.PREFILL]))
        and c.storage == best.storage
    }
    others = [f"{name} {us} us" for name, us in weighed.items() if name != best.prefill.name]
    if best.prefill.name in weighed and others and problem.request.moe_a2a_backend == "auto":
        found.append(
            f"{problem.budget.local} tokens of a rank there and back by {best.prefill.name}: about "
            f"{weighed[best.prefill.name]} us a layer by what was measured, before {', '.join(others)}"
        )
    return found


def why_sibling(
    best: Candidate, dispatchers: Sequence[DispatcherCapability], refused: Sequence[Refusal]
) -> list[str]:
    """Why the member of a family that was made for a phase does not serve it, where another does."""
    lines = []
    for phase in PHASES:
        own = best.dispatcher(phase)
        made = [d for d in dispatchers if own.family == d.family != "" and phase in d.made_for]
        if own.name not in (names := {d.name for d in made}):
            against = [r for r in refused if r.who.removeprefix("dispatcher ") in names]
            lines += [f"{phase} not by {r.who}: {r.asked}: {r.limit}" for r in against[:1]]
    return lines


def _why_wire(problem: PlanningProblem, best: Candidate, phase: Phase) -> str:
    if problem.request.moe_dispatch_dtype != "auto":
        return "asked for with --moe-dispatch-dtype"
    if best.wire[phase] == Format.BF16:
        return f"unquantised ({problem.compute_dtype}), which costs no accuracy"
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


def why_tuning(problem: PlanningProblem, best: Candidate, table: TuningTable) -> list[str]:
    """A device that is only named has no table: nothing to say of it."""
    tuning = best.runner.tuning
    if tuning is None or not problem.hardware.present:
        return []
    return [tuning.explain(table, problem.hardware, deterministic=problem.request.deterministic)]


def _why_activation(problem: PlanningProblem, best: Candidate) -> str:
    if problem.request.moe_activation_dtype != "auto":
        return "asked for with --moe-activation-dtype"
    if best.activation == Format.NVFP4:
        units = problem.native_fp4 and best.runner.fp4_units
        return (
            "the checkpoint calibrated them, and FP4 units multiply them" if units else "all the runner takes"
        )
    if best.activation == Format.FP8:
        return "the checkpoint's own scheme, per token and 128 columns"
    if problem.spec.format == Format.BF16:
        return "the checkpoint is not quantised"
    if not problem.spec.quantized_activations:
        return "weight-only, as the checkpoint asks"
    if not problem.hardware.has_fp4_units:
        return f"weight-only, for {problem.hardware.name} has no FP4 units and emulating them gains no speed"
    return "weight-only, for the runner does not use the FP4 units"


def _why_storage(problem: PlanningProblem, best: Candidate) -> str:
    size = gigabytes(best.weight_bytes * problem.num_layers)
    if problem.request.moe_weight_storage != "auto":
        return f"asked for with --moe-weight-storage; {size} for {problem.num_layers} layers"
    packed = problem.weight_bytes(WeightStorage.PACKED)
    if best.storage == WeightStorage.PACKED:
        decoded = gigabytes(problem.weight_bytes(WeightStorage.DECODED) * problem.num_layers)
        return f"{size} for {problem.num_layers} layers, where decoded once they would take {decoded}"
    if best.weight_bytes <= packed:
        return f"no larger than packed, {size} for {problem.num_layers} layers"
    if problem.decode_once():
        return f"{size} for {problem.num_layers} layers is small, and unpacking at each use is slow on a CPU"
    return f"the only storage that can run this; {size} for {problem.num_layers} layers"
