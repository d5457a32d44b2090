"""Tuning: time what a plan allows on the model's own first MoE layer, and keep the times.

The model reads some text on one rank, so that inputs and routes are real; then each runner gets this rank's
slice of the layer's experts, in the setting a plan would give it. First come the tilings of runners that can
be cut one way or another, then the runners, with the best of these. `plan` and `serve` with the same device,
versions, layer and ranks choose by what is kept (moe/backends/hopper/tuning_tables.py,
moe/planning/measured.py).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from turnout.cache import cache_folder, lasting_folder
from turnout.checkpoint import open_checkpoint
from turnout.config import Config
from turnout.engine.engine_plan import EnginePlan, resolve
from turnout.engine.selfcheck import ROWS, Watch, largest, prompts
from turnout.errors import PlanRefused, Refusal, UserError
from turnout.formats.experts import ExpertWeights, shard
from turnout.models import load_model
from turnout.models.interface import ProgressFn
from turnout.moe.backends.declarations import RUNNER_CAPABILITIES
from turnout.moe.backends.flashinfer import autotune
from turnout.moe.backends.hopper import tuning_tables
from turnout.moe.backends.hopper.autotune import Tiled, copies, tile_times, to_compile
from turnout.moe.backends.hopper.tile_config import REVISIONS, TileTable
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.interface import Runner
from turnout.moe.plan import MoEPlan
from turnout.moe.planning import measured
from turnout.moe.planning.measured import Measured
from turnout.moe.tune import TOKENS, times
from turnout.moe.verify import Inputs
from turnout.parallel.groups import ALONE
from turnout.parallel.topology import Topology
from turnout.registry import RUNNERS

TEXTS = 4  # batches of one size begin so many times at another row
ONE_RANK: dict[str, Any] = {
    "tp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "enable_dp_attention": False,
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


def _kept(write: Callable[[], Path]) -> Path:
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
    for name in RUNNER_CAPABILITIES:
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
        if "tokens" not in RUNNER_CAPABILITIES[name].layouts:
            continue
        if RUNNER_CAPABILITIES[name].tiled:
            plan = replace(plan, tiles=_tune_tiles(engine_plan, name, plan, own, inputs, progress))
        runners[name] = RUNNERS.get(name)(spec, plan, device)
        runners[name].prepare(own)
        _choose_tactics(engine_plan, runners[name], plan, device, progress)
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
        versions=measured.versions(),
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
) -> TileTable:
    """Measure the table of a tiled runner, and keep it."""
    from turnout.kernels.common.compilation import compilers, submit

    device, most = torch.device(engine_plan.hardware.device), largest(plan, inputs.x_TH.device)
    runners: list[Tiled] = []
    for _ in range(copies(own.nbytes)):
        runner = RUNNERS.get(name)(engine_plan.description.moe, replace(plan, tiles=()), device)
        runner.prepare(own)
        runners.append(runner)

    @cache
    def batches(tokens: int) -> list[TokensBatch]:
        starts = range(0, len(inputs), -(-len(inputs) // TEXTS))
        some = [
            inputs[(torch.arange(tokens, device=inputs.x_TH.device) + start) % len(inputs)]
            for start in starts
        ]
        return [
            TokensBatch(hidden=Hidden(data=part.x_TH), topk_ids=part.ids_TK, topk_weights=part.weights_TK)
            for part in some
        ]

    with compilers() as pool:
        jobs = submit(pool, to_compile(runners[0], batches, most))
        for done, _ in enumerate(as_completed(jobs)):
            progress("compiling kernels", done + 1, len(jobs))
    entries = tile_times(
        runners, batches, most, lambda done, of: progress(f"timing tilings of {name}", done, of)
    )
    shape = runners[0].shape
    table = tuning_tables.Table(
        shape=shape,
        revision=REVISIONS[shape.kernel],
        date=datetime.date.today().isoformat(),
        entries=tuple(entries),
    )
    content = tuning_tables.TileFile(
        device=engine_plan.hardware.name, versions=tuning_tables.versions(), tables=(table,)
    )
    _kept(
        lambda: tuning_tables.write(
            tuning_tables.path(lasting_folder(), table.shape, engine_plan.hardware), content
        )
    )
    return tuple((entry.tokens, entry.tiles) for entry in entries)


def _choose_tactics(
    engine_plan: EnginePlan, runner: Runner, plan: MoEPlan, device: torch.device, progress: ProgressFn
) -> None:
    """As a server's start would, so that the runner is timed as it will serve."""
    if autotune.wanted(plan):
        autotune.tune(
            runner,
            engine_plan.description.moe,
            plan,
            device=device,
            device_name=engine_plan.hardware.name,
            world=ALONE.world,
            folder=cache_folder(),
            progress=progress,
        )


def _first_layer(
    config: Config, tokens: int, device: torch.device, progress: ProgressFn
) -> tuple[ExpertWeights, Inputs]:
    """All experts of the model's first MoE layer, and what it is given when the model reads some text."""
    alone = resolve(replace(config, **ONE_RANK))
    watch = Watch(alone, alone.description.moe_layers[:1], device)
    model = load_model(
        open_checkpoint(alone.folder),
        alone.plan,
        groups=ALONE,
        device=device,
        dtype=getattr(torch, alone.compute_dtype),
        progress=progress,
        make_runner=watch.make_runner,
    )
    watch.look(model, prompts(alone, tokens, seed=0)[0])
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
