"""Tuning: time what a plan allows on the model's own first MoE layer, and keep the times.

The model reads some text on one rank, so that inputs and routes are real; then each runner gets this rank's
slice of the layer's experts, in the setting a plan would give it. First come the tilings of runners that can
be cut one way or another, then the runners, with the best of these. `plan` and `serve` with the same device,
versions, layer and ranks choose by what is kept (moe/capabilities/tuning.py,
moe/planning/measured.py).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from turnout.cache import lasting_folder
from turnout.config import Config
from turnout.engine.engine_plan import EnginePlan, resolve
from turnout.engine.layer_inputs import ROWS, Watch, largest, load_alone, prompts
from turnout.errors import PlanRefused, Refusal, UserError
from turnout.formats.experts import ExpertWeights, shard
from turnout.models.interface import ProgressFn
from turnout.moe.autotune import autotune
from turnout.moe.batch import TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.capabilities.tuning import TuningTable
from turnout.moe.interface import Runner
from turnout.moe.plan import MoEPlan
from turnout.moe.planning import measured
from turnout.moe.planning.measured import Measured
from turnout.moe.tune import TOKENS, times
from turnout.moe.verify import Inputs
from turnout.parallel.groups import SINGLE_RANK
from turnout.parallel.topology import Topology
from turnout.vocabulary import Layout

T = TypeVar("T")

TEXTS = 4  # batches of one size begin so many times at another row
ONE_RANK: dict[str, Any] = {
    "tp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "enable_dp_attention": False,
    "moe_dense_tp_size": 0,
    "enable_dp_lm_head": False,
    "nnodes": 1,
    "node_rank": 0,
    "moe_a2a_backend": "auto",
    "moe_dispatch_dtype": "auto",
}


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was measured, the file that keeps it, and why other runners were not."""

    measured: Measured
    file: Path
    refused: tuple[Refusal, ...]


def tune(config: Config, progress: ProgressFn) -> Tuned:
    """Measure and keep. Raises UserError, PlanRefused if nothing can run."""
    if config.moe_runner_backend != "auto":
        raise UserError(
            f"--moe-runner-backend {config.moe_runner_backend}: tune measures all runners; leave it at auto"
        )
    folder = lasting_folder()
    engine_plan = resolve(config)
    plans, refused = _plans(config)
    found = _measure(engine_plan, plans, progress)
    file = _kept(lambda: measured.write(folder, found))
    return Tuned(measured=found, file=file, refused=tuple(refused))


def _kept(write: Callable[[], T]) -> T:
    try:
        return write()
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can"
        ) from None


def _plans(config: Config) -> tuple[dict[str, MoEPlan], list[Refusal]]:
    """By runner the plan it would run in, and why others cannot."""
    plans: dict[str, MoEPlan] = {}
    refused: list[Refusal] = []
    for name in RUNNERS:
        try:
            plans[name] = resolve(replace(config, moe_runner_backend=name)).plan
        except PlanRefused as error:
            refused += error.refusals
    return plans, list(dict.fromkeys(refused))


def _measure(engine_plan: EnginePlan, plans: dict[str, MoEPlan], progress: ProgressFn) -> Measured:
    spec, topology = engine_plan.description.moe, engine_plan.topology
    device = torch.device(engine_plan.hardware.device)
    most = min(TOKENS[-1], largest(engine_plan.plan, device))
    experts, inputs = _first_layer(engine_plan.config, min(most, ROWS), device, progress)
    own = _part(experts, topology)
    inputs = inputs.to(device, getattr(torch, engine_plan.compute_dtype))
    runners: dict[str, Runner] = {}
    for name, plan in plans.items():
        if Layout.TOKENS not in RUNNERS[name].layouts:
            continue
        if RUNNERS[name].tuning is not None:
            plan = replace(plan, tiles=_tune_tiles(engine_plan, name, plan, own, inputs, progress))
        runners[name] = RUNNERS.load(name)(spec, plan, device)
        runners[name].prepare(own)
        autotune(  # as a server's start would, so that the runner is timed as it will serve
            runners[name],
            spec,
            plan,
            device=device,
            device_name=engine_plan.hardware.name,
            world=SINGLE_RANK.world,
            progress=progress,
        )
    with torch.inference_mode():
        found = times(runners, inputs, most, lambda done, of: progress("timing runners", done, of))
    return Measured(
        layer=measured.describe(
            spec,
            topology,
            engine_plan.hardware,
            engine_plan.compute_dtype,
            engine_plan.config.moe_activation_dtype,
        ),
        versions=measured.versions(RUNNERS.values()),
        date=datetime.date.today().isoformat(),
        microseconds=found,
    )


@torch.inference_mode()
def _tune_tiles(
    engine_plan: EnginePlan,
    name: str,
    plan: MoEPlan,
    own: ExpertWeights,
    inputs: Inputs,
    progress: ProgressFn,
) -> TuningTable:
    """Measure the table of a runner whose kernels can be cut one way or another, and keep it."""
    tuning = RUNNERS[name].tuning
    assert tuning is not None, "asked of those that have one"
    device, most = torch.device(engine_plan.hardware.device), largest(plan, inputs.x_TH.device)

    def make_runner() -> Runner:
        runner: Runner = RUNNERS.load(name)(engine_plan.description.moe, replace(plan, tiles=()), device)
        runner.prepare(own)
        return runner

    @cache
    def batches(tokens: int) -> list[TokensBatch]:
        starts = range(0, len(inputs), -(-len(inputs) // TEXTS))
        return [inputs.repeated(tokens, start).batch for start in starts]

    return _kept(
        lambda: tuning.measure(
            make_runner,
            batches,
            weight_bytes=own.nbytes,
            most=most,
            hardware=engine_plan.hardware,
            folder=lasting_folder(),
            progress=progress,
        )
    )


def _first_layer(
    config: Config, tokens: int, device: torch.device, progress: ProgressFn
) -> tuple[ExpertWeights, Inputs]:
    """All experts of the model's first MoE layer, and what it is given when the model reads some text."""
    single = resolve(replace(config, **ONE_RANK))
    watch = Watch(single, single.description.moe_layers[:1], device)
    model = load_alone(single, single.plan, device, progress, watch.make_runner)
    watch.look(model, prompts(single, tokens, seed=0)[0])
    (watched,) = watch.watched.values()
    assert watched.experts is not None, "kept until forgotten"
    return watched.experts, watched.inputs()


def _part(experts: ExpertWeights, topology: Topology) -> ExpertWeights:
    """This rank's share of all experts."""
    held = topology.expert_range(experts.num_experts)
    rows = slice(held.start, held.stop)
    some = replace(
        experts,
        w13=experts.w13[rows],
        w2=experts.w2[rows],
        b13=None if experts.b13 is None else experts.b13[rows],
        b2=None if experts.b2 is None else experts.b2[rows],
        first_expert=held.start,
    )
    return shard(some, topology.expert_tp_rank, topology.expert_tp)
