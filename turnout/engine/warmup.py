"""What is decided between loading and serving, once for all ranks: the cuts of library kernels, that all
kernels of prompts are compiled, sizes of steps that would take too long, and how long steps take where they
have a target."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch

from turnout.engine.chosen_sizes import STEP_SECONDS, sizes_to_time
from turnout.engine.engine_plan import EnginePlan
from turnout.engine.messages import AddRequest
from turnout.engine.ranks.step_sync import StepSync, SyncedStep
from turnout.engine.sampling.sampler import draw_ordered
from turnout.engine.sampling.token_masks import forbid
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.scheduler.kv_cache import KVCache
from turnout.engine.scheduler.request import Request
from turnout.engine.scheduler.scheduler import Chunk, Scheduler
from turnout.engine.scheduler.step_times import LEAST_TOKENS, StepTimes
from turnout.engine.step.cuda_graphs import Computed
from turnout.engine.step.forward import Forward
from turnout.engine.step.rehearsal import rehearsal
from turnout.flags import flag_name
from turnout.models.interface import DraftingModel, Model, ProgressFn
from turnout.models.prepared import Prepared
from turnout.moe.autotune import autotune
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.interface import Experts, Runner
from turnout.moe.plan import MoEPlan
from turnout.moe.runner_by_batch_size import RunnerByBatchSize, make_runner
from turnout.moe.spec import MoESpec
from turnout.parallel.groups import Groups
from turnout.vocabulary import Layout, Phase

logger = logging.getLogger(__name__)
# Tokens: the most that connections of residual streams cut as they do 64 (kernels/common/streams.py).
LAST_CUT_AS_64 = 80


class Tuner:
    """Makes the runners of a model's layers; compiles and tunes with the first of each plan, as all have the
    same sizes."""

    def __init__(
        self,
        engine_plan: EnginePlan,
        device: torch.device,
        make_runner: Callable[[int], Experts] | None,
    ) -> None:
        """make_runner: gives the runner of a layer instead of the plan."""
        self._engine_plan, self._device, self._make = engine_plan, device, make_runner or self._planned
        self._made = 0
        self._first: dict[MoESpec, tuple[int, MoEPlan]] = {}  # number of the layer

    def make_runner(self, layer: int) -> Experts:
        spec, plan = self._engine_plan.experts_of(layer)
        runner = self._make(layer)
        self._first.setdefault(spec, (self._made, plan))
        self._made += 1
        return runner

    def tune(
        self,
        experts: Sequence[Experts],
        groups: Groups,
        progress: ProgressFn | None,
        shared: Prepared | None = None,
    ) -> None:
        """Collective. experts: of the layers, with their weights, in the order in which they were made; those
        that another process prepared are not what `make_runner` gave. shared: where the next rank finds what
        was looked for. Raises UserError where ranks cannot share tactics."""
        engine_plan = self._engine_plan
        for spec, (layer, plan) in self._first.items():
            runner = experts[layer]
            if self._device.type == "cuda":
                threads = max(1, (os.cpu_count() or 1) // engine_plan.topology.ranks_per_node)
                compile_experts(runner, spec, plan, self._device, threads, shared, layer)
            autotune(
                runner,
                spec,
                plan,
                device=self._device,
                device_name=engine_plan.hardware.name,
                world=groups.world,
                progress=progress,
            )

    def _planned(self, layer: int) -> Experts:
        return make_runner(*self._engine_plan.experts_of(layer), self._device)


def compile_experts(
    runner: Experts,
    spec: MoESpec,
    plan: MoEPlan,
    device: torch.device,
    threads: int,
    shared: Prepared | None = None,
    layer: int = 0,
) -> list[int]:
    """Compile, in `threads`, every variant of a kernel that a batch within the plan's bounds may need.

    shared: where batch sizes are that another rank has found for this layer, since thousands are tried, which
    takes a second. Returns the batch sizes, in tokens, that need all variants; none where a runner launches
    other kernels than Triton's, which would run.
    """
    from turnout.kernels.common.compilation import can_record, compiling, covering

    if not can_record():
        return []
    most = max((p.max_tokens for p in (plan.prefill, plan.decode) if p.layout == Layout.TOKENS), default=0)
    dtype, found = getattr(torch, plan.compute_dtype), []
    parts = list(runner.parts.values()) if isinstance(runner, RunnerByBatchSize) else [cast(Runner, runner)]
    for number, part in enumerate(parts):
        if most and part.capability.all_triton:
            call = partial(_compute, part, spec, dtype, device)
            find = partial(covering, call, most)
            sizes = shared.keep(f"batch sizes of {layer}, {number}", find) if shared else find()
            with compiling(threads):
                for size in sizes:
                    call(size)
            found += sizes
    return found


def _compute(part: Runner, spec: MoESpec, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
    part(empty_batch(spec, tokens, dtype, device))


def count_compilations(device: torch.device) -> Callable[[], int]:
    """Count kernels that are compiled from now on; what is returned says how many."""
    if device.type != "cuda":
        return lambda: 0
    from turnout.kernels.common.compilation import CompilationCounter

    counter = CompilationCounter()
    counter.start()
    return lambda: counter.count


def empty_batch(spec: MoESpec, tokens: int, dtype: torch.dtype, device: torch.device) -> TokensBatch:
    """A batch whose values are nothing in particular, for calls that launch nothing."""
    return TokensBatch(
        hidden=Hidden(data=torch.empty(tokens, spec.hidden_size, dtype=dtype, device=device)),
        topk_ids=torch.empty(tokens, spec.top_k, dtype=torch.int32, device=device),
        topk_weights=torch.empty(tokens, spec.top_k, dtype=torch.float32, device=device),
    )


def prompt_sizes(most: int, residual_streams: int) -> list[int]:
    """Tokens of steps that between them take every kernel of a prompt outside the experts, whose sizes
    `compile_experts` finds: those change at powers of two, and connections of several residual streams
    behind LAST_CUT_AS_64 too."""
    powers = [1 << i for i in range(most.bit_length())]
    sizes = {size for power in powers for size in (power, power - 1) if size}
    if residual_streams > 1:
        sizes.add(min(LAST_CUT_AS_64, most))
    return sorted(sizes | {most})


def first_prompts(
    engine_plan: EnginePlan, forward: Forward, model: Model, kv: KVCache, progress: ProgressFn | None
) -> None:
    """Compute made-up prompts of all sizes, so that no request waits for a compiler: each kernel takes it a
    second; a draft layer computes them too. Collective; before any request. Leaves no trace but in memory
    that is free."""
    config = engine_plan.config
    rows, room = _room(engine_plan, kv)
    most = min(config.max_prefill_tokens, room * rows)
    sizes = prompt_sizes(most, model.shape.residual_streams)
    steps = [_cut(size, room) for size in sizes]
    # Single tokens decode. Into how many spans attention cuts their contexts halves as their number doubles.
    most = min(rows, config.max_prefill_tokens)
    steps += [[1] * count for count in sorted({most, *(1 << i for i in range(1, most.bit_length()))} - {1})]
    with rehearsal(engine_plan, model)() as rehearsed:
        for lengths in steps if rehearsed else ():
            _first_prompts(engine_plan, forward, model, kv, lengths, (True, False))
    for done, lengths in enumerate(steps):
        if progress is not None:
            progress("compiling", done, len(steps))
        _first_prompts(engine_plan, forward, model, kv, lengths, forward.ways(sum(lengths)), draw=not done)
    for parity in (0, 1) if engine_plan.topology.dp_size > 1 else ():
        _uneven_prompts(engine_plan, forward, model, kv, _cut(sizes[-1], room), parity)
    model.reset_counts()


def _first_prompts(
    engine_plan: EnginePlan,
    forward: Forward,
    model: Model,
    kv: KVCache,
    lengths: Sequence[int],
    ways: tuple[bool, bool],
    *,
    draw: bool = False,
) -> None:
    """A step to which every rank brings prompts of these lengths, and its logits. ways: as `Forward.ways` has
    them, one or both. draw: also from what the logits allow."""
    synced = _alike(engine_plan, Phase.PREFILL, lengths)
    computed = _computed(engine_plan, forward, model, kv, lengths, synced, ways)
    # As many requests may end their prompts in one step: products of a head differ by rows too.
    logits_SV = model.logits(computed.hidden_NH[-engine_plan.config.max_running_requests :])
    if draw:
        words = -(-logits_SV.shape[1] // 32)
        forbid(logits_SV, torch.full((len(logits_SV), words), -1, dtype=torch.int32).to(logits_SV.device))
        draw_ordered(logits_SV[:1].float(), [SamplingParams(temperature=1.0, top_p=0.5)], [0.5])


def _uneven_prompts(
    engine_plan: EnginePlan,
    forward: Forward,
    model: Model,
    kv: KVCache,
    lengths: Sequence[int],
    parity: int,
) -> None:
    """A step of prompts of these lengths on every other data-parallel rank, from `parity` on, and of one
    token on those between: what an exchange launches depends on what other ranks bring."""
    dp_rank, ranks = engine_plan.topology.dp_rank, range(engine_plan.topology.dp_size)
    each = tuple(sum(lengths) if rank % 2 == parity else 1 for rank in ranks)
    own = lengths if dp_rank % 2 == parity else [1]
    synced = _step_of(Phase.PREFILL, each, max(lengths))
    _computed(engine_plan, forward, model, kv, own, synced, (False, True))


def _computed(
    engine_plan: EnginePlan,
    forward: Forward,
    model: Model,
    kv: KVCache,
    lengths: Sequence[int],
    synced: SyncedStep,
    ways: tuple[bool, bool],
) -> Computed:
    """A step of this rank's prompts of these lengths, the last of `ways`; a draft layer goes over it too."""
    chunks = _prompts(engine_plan, lengths)
    for chunk in chunks:
        kv.admit(chunk.request, chunk.length, spare=0)
    eagerly, as_called = ways
    if eagerly:
        computed = forward.eagerly(chunks, synced)
    if as_called:
        computed = forward(chunks, synced)
    if engine_plan.config.drafts_by_layer:
        assert computed.step is not None, "a draft layer goes over the tokens of every step"
        cast(DraftingModel, model).draft(computed.step, computed.hidden_NH)
    for chunk in chunks:
        kv.release(chunk.request)
    return computed


def measure_steps(
    engine_plan: EnginePlan,
    forward: Forward,
    model: Model,
    kv: KVCache,
    times: StepTimes,
    step_sync: StepSync,
) -> dict[str, dict[int, float]]:
    """Tell `times` how long steps take that decode 1, 2, 4, ... requests, and those of 16, 32, ... prompt
    tokens, up to the first that takes longer than its target on some rank. Collective; before any request.

    Returns milliseconds of this rank, by phase and size. Contexts are short; `times` learns on as they grow.
    """
    config, pages = engine_plan.config, min(pool.num_available for pool in kv.pools)
    rows = min(config.max_running_requests, pages)
    longest = min(pages * engine_plan.page_size, engine_plan.chunk_tokens, config.max_prefill_tokens)
    longest = min(longest, engine_plan.max_context)
    found: dict[str, dict[int, float]] = {}
    for phase, least, most in ((Phase.DECODE, 1, rows), (Phase.PREFILL, LEAST_TOKENS, longest)):
        found[phase] = {}
        size, slowest = least, 0.0
        while size <= most and slowest <= times.target:
            decodes = phase == Phase.DECODE
            seconds = _seconds(engine_plan, forward, kv, phase, [1] * size if decodes else [size])
            times.measured(size if decodes else 0, 0 if decodes else size, seconds)
            found[phase][size] = 1000 * seconds
            slowest = max(step_sync.share_count(round(1e6 * seconds))) / 1e6
            size *= 2
    model.reset_counts()
    times.prompt_tokens(1, LEAST_TOKENS)  # says so if no step meets the target
    return found


def lower_sizes(
    engine_plan: EnginePlan, forward: Forward, model: Model, scheduler: Scheduler, step_sync: StepSync
) -> tuple[EnginePlan, dict[str, dict[int, float]]]:
    """The plan, and `scheduler`, with sizes that the plan chose halved while a step of as many takes longer
    than STEP_SECONDS on some rank. Collective; before any request. Buffers keep the size that was planned.

    Also returns milliseconds of this rank, by phase and size.
    """
    timed = sizes_to_time(engine_plan)
    if not timed:
        return engine_plan, {}
    rows, room = _room(engine_plan, scheduler.kv)
    lowered, reasons = {}, dict(engine_plan.size_reasons)
    found: dict[str, dict[int, float]] = {}
    for name, sizes in timed.items():
        phase = Phase.PREFILL if name == "max_prefill_tokens" else Phase.DECODE
        found[phase] = {}
        for size in sizes:
            lengths = _cut(min(size, room * rows), room) if phase == Phase.PREFILL else [1] * min(size, rows)
            seconds = _seconds(engine_plan, forward, scheduler.kv, phase, lengths)
            found[phase][size] = 1000 * seconds
            slowest = max(step_sync.share_count(round(1e6 * seconds))) / 1e6
            if slowest <= STEP_SECONDS or size == sizes[-1]:
                break
            lowered[name] = size // 2
            took, most = 1000 * slowest, 1000 * STEP_SECONDS
            reasons[name] = f"a step of {size} took {took:.0f} ms, more than {most:g}"
        if name in lowered and step_sync.topology.rank == 0:
            logger.warning("%s %d: %s", flag_name(name), lowered[name], reasons[name])
    model.reset_counts()
    engine_plan = dataclasses.replace(engine_plan, size_reasons=reasons, lowered_sizes=lowered)
    scheduler.lower(
        max_running=engine_plan.size("max_running_requests"),
        prefill_tokens=engine_plan.size("max_prefill_tokens"),
    )
    return engine_plan, found


def _seconds(
    engine_plan: EnginePlan, forward: Forward, kv: KVCache, phase: Phase, lengths: Sequence[int]
) -> float:
    """That a step of prompts of these lengths takes, at best of three. Collective."""
    chunks = _prompts(engine_plan, lengths)
    synced = _alike(engine_plan, phase, lengths)
    for chunk in chunks:
        kv.admit(chunk.request, chunk.length, spare=0)
    seconds = min(_run(forward, chunks, synced) for _ in range(3))
    for chunk in chunks:
        kv.release(chunk.request)
    return seconds


def _run(forward: Forward, chunks: list[Chunk], synced: SyncedStep) -> float:
    began = time.perf_counter()
    computed = forward(chunks, synced)
    logits_SV, _ = forward.logits(computed, list(range(len(chunks))))
    if logits_SV.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _alike(engine_plan: EnginePlan, phase: Phase, lengths: Sequence[int]) -> SyncedStep:
    """A step to which every rank brings prompts of these lengths."""
    return _step_of(phase, (sum(lengths),) * engine_plan.topology.dp_size, max(lengths))


def _step_of(phase: Phase, tokens: tuple[int, ...], longest: int) -> SyncedStep:
    return SyncedStep(phase=phase, tokens=tokens, longest=longest, commands=0, pending=False, leaving=False)


def _room(engine_plan: EnginePlan, kv: KVCache) -> tuple[int, int]:
    """Requests that run together, and tokens that each may then have."""
    pages = min(pool.num_available for pool in kv.pools)
    rows = min(engine_plan.config.max_running_requests, pages)
    return rows, min(engine_plan.max_context, pages // rows * engine_plan.page_size)


def _cut(size: int, most: int) -> list[int]:
    return [min(most, size - at) for at in range(0, size, most)]


def _prompts(engine_plan: EnginePlan, lengths: Sequence[int]) -> list[Chunk]:
    """Of tokens that differ, so that these need as many experts as those of real prompts."""
    draw, vocabulary = random.Random(0), range(engine_plan.description.shape.vocab_size)
    chunks = []
    for row, length in enumerate(lengths):
        ids = draw.choices(vocabulary, k=length)
        message = AddRequest(id=f"first-{row}", prompt_ids=ids, sampling=SamplingParams(max_tokens=1))
        request = Request.start(message, seed=0, eos_token_ids=())
        request.row, request.state_slots = row, [row]
        chunks.append(Chunk(request, 0, length))
    return chunks
