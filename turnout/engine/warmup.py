"""What is decided between loading and serving, once for all ranks: the cuts of library kernels, and that all
kernels of prompts are compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch

from turnout.cache import cache_folder
from turnout.engine.engine_plan import EnginePlan
from turnout.engine.messages import AddRequest
from turnout.engine.ranks.step_sync import SyncedStep
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.scheduler.block_pool import KVBlockPool
from turnout.engine.scheduler.request import Request
from turnout.engine.scheduler.scheduler import Chunk
from turnout.engine.step.forward import Forward
from turnout.models.interface import Model, ProgressFn
from turnout.moe.autotune import autotune
from turnout.moe.interface import Experts
from turnout.moe.runner_by_batch_size import make_runner
from turnout.parallel.groups import Groups
from turnout.vocabulary import Phase


class Tuner:
    """Makes the runners of a model's layers, and tunes with the first: all layers have the same sizes."""

    def __init__(
        self,
        engine_plan: EnginePlan,
        device: torch.device,
        make_runner: Callable[[int], Experts] | None = None,
    ) -> None:
        """make_runner: gives the runner of a layer instead of the plan."""
        self._engine_plan, self._device, self._make = engine_plan, device, make_runner or self._planned
        self._first: Experts | None = None

    def make_runner(self, layer: int) -> Experts:
        runner = self._make(layer)
        self._first = self._first or runner
        return runner

    def tune(self, groups: Groups, progress: ProgressFn | None) -> None:
        """Collective. Raises UserError where ranks cannot share tactics."""
        engine_plan, runner, self._first = self._engine_plan, self._first, None
        if runner is None:
            return
        autotune(
            runner,
            engine_plan.description.moe,
            engine_plan.plan,
            device=self._device,
            device_name=engine_plan.hardware.name,
            world=groups.world,
            folder=cache_folder(),
            progress=progress,
        )

    def _planned(self, layer: int) -> Experts:
        plan = self._engine_plan.plan
        return make_runner(self._engine_plan.description.moe, plan, self._device)


def prompt_sizes(most: int) -> list[int]:
    """Tokens of steps that between them take every kernel a prompt may: runners cut batches by powers of two
    or more, and kernels are compiled for sizes that are multiples of 16 and for others."""
    powers = [1 << i for i in range(most.bit_length())]
    return sorted({size for power in powers for size in (power, power - 1) if size} | {most})


def first_prompts(
    engine_plan: EnginePlan, forward: Forward, model: Model, pool: KVBlockPool, progress: ProgressFn | None
) -> None:
    """Compute made-up prompts of all sizes, so that no request waits for a compiler: each kernel takes it a
    second. Collective; before any request. Leaves no trace but in memory that is free."""
    config, topology = engine_plan.config, engine_plan.topology
    rows = min(config.max_running_requests, pool.num_available)
    room = min(engine_plan.max_context, pool.num_available // rows * engine_plan.page_size)
    sizes = prompt_sizes(min(config.max_prefill_tokens, room * rows))
    for done, size in enumerate(sizes):
        if progress is not None:
            progress("compiling", done, len(sizes))
        chunks = [_prompt(row, min(room, size - at)) for row, at in enumerate(range(0, size, room))]
        for chunk in chunks:
            chunk.request.pages = pool.allocate(-(-chunk.length // engine_plan.page_size)) or []
        synced = SyncedStep(
            phase=Phase.PREFILL, tokens=(size,) * topology.dp_size, commands=0, pending=False, leaving=False
        )
        computed = forward(chunks, synced)
        model.logits(computed.hidden_NH[-1:])
        for chunk in chunks:
            pool.release(chunk.request.pages)
    model.reset_counts()


def _prompt(row: int, length: int) -> Chunk:
    message = AddRequest(id=f"first-{row}", prompt_ids=[0] * length, sampling=SamplingParams(max_tokens=1))
    request = Request.start(message, seed=0, eos_token_ids=())
    request.row = row
    return Chunk(request, 0, length)
