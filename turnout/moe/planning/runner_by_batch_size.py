"""Two runners in turn, each for the batch sizes at which it was measured faster: when that is worth it.

Weights are prepared once for each, so that a second runner costs a second copy of the experts. `auto` takes
one where `turnout tune` found it WORTH times as fast at some batch sizes, it differs in nothing that the rest
of a plan rests on, and its copy takes no more than COPY_PART of the device's memory. Which of the two gets a
batch follows from the number of its tokens only. Runners hold no collectives, so ranks with batches of
different sizes may differ.

No torch here: planning asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from turnout.moe.budget import gigabytes
from turnout.moe.planning.candidates import Candidate
from turnout.moe.planning.problem import PlanningProblem
from turnout.vocabulary import Layout

WORTH = 1.1
COPY_PART = 1 / 8
ALL = 2**31 - 1  # a bound for any batch

Times = Mapping[str, Mapping[int, float]]  # us by runner and tokens of a batch
BatchSizes = tuple[tuple[int, str], ...]  # the most tokens of a batch, ascending, and its runner


def means(measured: Times) -> dict[str, float]:
    """By runner the geometric mean over batch sizes, in us: every size weighs the same, whatever its time."""
    return {
        runner: math.exp(sum(map(math.log, times.values())) / len(times))
        for runner, times in measured.items()
        if times
    }


def second(
    problem: PlanningProblem, best: Candidate, candidates: Sequence[Candidate], measured: Times
) -> tuple[Candidate, BatchSizes] | None:
    """The runner other than `best` that gains most, and who computes what; None where none is worth it."""
    own = measured.get(best.runner.name, {})
    if problem.request.moe_runner_backend != "auto" or problem.request.deterministic:
        return None
    found: list[tuple[float, Candidate, dict[int, str]]] = []
    for other in candidates:
        theirs = measured.get(other.runner.name, {})
        sizes = sorted(own.keys() & theirs.keys())
        if other.runner is best.runner or not sizes or not _fits(problem, best, other):
            continue
        faster = {tokens: own[tokens] >= WORTH * theirs[tokens] for tokens in sizes}
        gain = sum(math.log(own[tokens] / theirs[tokens]) for tokens in sizes if faster[tokens])
        names = {tokens: (other if faster[tokens] else best).runner.name for tokens in sizes}
        found.append((gain, other, names))
    if not found:
        return None
    gain, other, names = max(found, key=lambda entry: entry[0])
    return (other, _bounds(names)) if gain > 0 else None


def _fits(problem: PlanningProblem, best: Candidate, other: Candidate) -> bool:
    """Whether batches of a plan made for `best` can go to `other`, and its weights fit next to the others."""
    alike = (
        (best.prefill, best.decode, best.activation, best.storage, best.wire)
        == (other.prefill, other.decode, other.activation, other.storage, other.wire)
        and best.prefill.layout == best.decode.layout == Layout.TOKENS
        and (other.runner.graph_safe or not best.runner.graph_safe)
    )
    return alike and other.weight_bytes * problem.num_layers <= COPY_PART * problem.hardware.memory_bytes


def _bounds(names: Mapping[int, str]) -> BatchSizes:
    """Sizes between two that were measured go to the nearer one's runner, as a ratio."""
    found = [
        (math.isqrt(low * high), names[low])
        for low, high in pairwise(sorted(names))
        if names[low] != names[high]
    ]
    largest = max(names)
    return (*found, (ALL, names[largest]))


def why(
    best: Candidate, other: Candidate, buckets: BatchSizes, measured: Times, num_layers: int
) -> tuple[str, ...]:
    """For people."""
    shares, low = [], 1
    for most, name in buckets:
        shares.append(f"{low} tokens and more by {name}" if most == ALL else f"{low} to {most} by {name}")
        low = most + 1
    own, theirs = measured[best.runner.name], measured[other.runner.name]
    gain = max(own[tokens] / theirs[tokens] for tokens in own.keys() & theirs.keys())
    return (
        f"batches of {', '.join(shares)}: measured up to {gain:.2f} times as fast, for which "
        f"{other.runner.name} has its own copy of the experts, {gigabytes(other.weight_bytes * num_layers)}",
    )
