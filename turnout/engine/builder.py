"""Builds the engine of one rank: loads the weights that a plan names, checks them, and warms up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from typing import Any, cast

import torch

from turnout import __version__
from turnout.attention.caches import AttentionCaches
from turnout.attention.paged import paged_attention
from turnout.attention.states import request_states
from turnout.checkpoint import open_checkpoint
from turnout.checkpoint.fingerprint import stamp
from turnout.engine.core import EngineCore
from turnout.engine.engine_plan import EnginePlan
from turnout.engine.grammar_matcher import GrammarCompiler
from turnout.engine.ranks.rendezvous import share_plan
from turnout.engine.ranks.step_sync import StepSync
from turnout.engine.sampling.sampler import Sampler
from turnout.engine.sampling.token_masks import TokenMaskFiller
from turnout.engine.scheduler.block_pool import KVBlockPool
from turnout.engine.scheduler.kv_cache import KVCache
from turnout.engine.scheduler.prefill_delayer import PrefillDelayer
from turnout.engine.scheduler.scheduler import Scheduler
from turnout.engine.scheduler.snapshots import SnapshotPool
from turnout.engine.scheduler.step_times import StepTimes
from turnout.engine.selfcheck import SelfCheck
from turnout.engine.speculative.switch import DraftSwitch
from turnout.engine.startup import StartupTimes
from turnout.engine.state_limits import why_no_prefix_cache
from turnout.engine.step import batch_invariant
from turnout.engine.step.commit import StepCommit
from turnout.engine.step.draft_layer import LayerDrafter
from turnout.engine.step.forward import Forward
from turnout.engine.threads import default_threads, kernel_threads
from turnout.engine.warmup import Tuner, count_compilations, first_prompts, lower_sizes, measure_steps
from turnout.errors import UserError
from turnout.kernels import cpu
from turnout.models import load_model
from turnout.models.interface import DraftingModel, Model, ProgressFn
from turnout.models.prepared import Prepared
from turnout.models.shared_weights import SharedWeights
from turnout.models.weight_keeper import KeptWeights
from turnout.parallel.groups import SINGLE_RANK, Groups
from turnout.parallel.health import Progress, Unwatched
from turnout.vocabulary import Format

logger = logging.getLogger(__name__)


@contextmanager
def _memory_may_run_out() -> Iterator[None]:
    """Raises UserError where a limit leaves less memory of the host than was planned for."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # which torch raises, without a class of its own for CPUs
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        first = str(error).partition("\n")[0]
        raise UserError(
            f"memory ran out while the model was loaded ({first}): a limit (`ulimit -v`) leaves less than "
            "the machine has; raise it, or lower --max-total-tokens"
        ) from error


@_memory_may_run_out()
def build_engine(
    engine_plan: EnginePlan,
    *,
    model: Model | None = None,
    groups: Groups = SINGLE_RANK,
    step_sync: StepSync | None = None,
    watch: Progress | None = None,
    progress: ProgressFn | None = None,
    verify: str = "off",
    startup: StartupTimes | None = None,
    weights_memory: int = -1,
    keeper: int = -1,
    waiting: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> EngineCore:
    """The engine of this rank; collective among the ranks of a model.

    model: takes the place of the weights that `engine_plan` names. groups and step_sync: what `rendezvous`
    gives; by default there is one rank. watch: told how far a step is. progress: of loading. verify: "quick"
    or "full" checks what was loaded (selfcheck.py). startup: told when its phases begin. weights_memory: a
    descriptor of memory in which ranks of this host share prepared weights, if there is any. keeper: one of
    the door of a process that keeps this rank's (models/weight_keeper.py), if there is one. waiting: requests
    that will come at once. clock: seconds, by which steps are timed.

    Raises UserError (CheckpointError) for weights that are missing or wrong, for a check that fails, and
    where memory runs out.
    """
    engine_plan = share_plan(engine_plan, groups)
    step_sync, startup = step_sync or StepSync(), startup or StartupTimes()
    config, device = engine_plan.config, torch.device(engine_plan.hardware.device)
    num_threads = _use_threads(config.num_threads, engine_plan.topology.ranks_per_node, device)
    loaded: dict[str, Any] = {"num_threads": num_threads, "verify": {"extent": "off"}}
    grammars = _make_grammars(engine_plan, model)  # reads the tokenizer while this thread waits for weights
    if model is None:
        read = verify != "off"  # what is checked has to be
        shared = None if read else _prepared(engine_plan, groups, device, weights_memory, keeper)
        model, found = _load(engine_plan, groups, device, verify, progress, startup, shared)
        loaded |= found
    startup.begin("kv_cache")
    scheduler = _make_scheduler(engine_plan)
    attention = _make_attention(engine_plan, device)
    if not (engine_plan.why_no_decode_graphs and engine_plan.why_no_prefill_graphs):
        startup.begin("cuda_graphs")
    forward = Forward(engine_plan, model, attention, progress, waiting)
    engine_plan, measured = _warm_up(engine_plan, forward, model, scheduler, step_sync, progress, startup)
    return EngineCore(
        engine_plan,
        model=model,
        scheduler=scheduler,
        attention=attention,
        forward=forward,
        commit=_make_commit(engine_plan, model, forward, scheduler, step_sync, device),
        grammars=grammars,
        step_sync=step_sync,
        watch=watch or Unwatched(),
        drafter=_make_drafter(engine_plan, model, forward, scheduler.kv, step_sync),
        loaded=loaded | measured,
        compilations=count_compilations(device),
        clock=clock,
    )


def _warm_up(
    engine_plan: EnginePlan,
    forward: Forward,
    model: Model,
    scheduler: Scheduler,
    step_sync: StepSync,
    progress: ProgressFn | None,
    startup: StartupTimes,
) -> tuple[EnginePlan, dict[str, Any]]:
    """The plan, with lower sizes where steps took too long, and for `EngineCore.loaded` what was measured."""
    startup.begin("warm_up")
    with torch.inference_mode():
        if engine_plan.hardware.device == "cuda":
            first_prompts(engine_plan, forward, model, scheduler.kv, progress)
        engine_plan, step_ms = lower_sizes(engine_plan, forward, model, scheduler, step_sync)
        if scheduler.times is not None:
            step_ms = step_ms | measure_steps(
                engine_plan, forward, model, scheduler.kv, scheduler.times, step_sync
            )
    return engine_plan, {"measured_step_ms": step_ms} if step_ms else {}


def _load(
    engine_plan: EnginePlan,
    groups: Groups,
    device: torch.device,
    verify: str,
    progress: ProgressFn | None,
    startup: StartupTimes,
    shared: Prepared | None,
) -> tuple[Model, dict[str, Any]]:
    """The model with its weights, and for `EngineCore.loaded` what checking them showed and how many were
    prepared already."""
    startup.begin("weights")
    check = None if verify == "off" else SelfCheck(engine_plan, verify, device)
    tuner = Tuner(engine_plan, device, check.make_runner if check else None)
    model = load_model(
        open_checkpoint(engine_plan.folder),
        engine_plan.plan,
        groups=groups,
        device=device,
        dtype=getattr(torch, engine_plan.compute_dtype),
        progress=progress,
        make_runner=tuner.make_runner,
        drafts=engine_plan.config.drafts_by_layer,
        shared=shared,
        index_fp8=engine_plan.config.index_cache_dtype == Format.FP8,
    )
    startup.begin("kernels")
    tuner.tune(model.experts, groups, progress, shared)
    if check:
        startup.begin("check")
    loaded: dict[str, Any] = {"verify": check.run(model) if check else {"extent": "off"}}
    if shared is not None:
        shared.close()
        loaded["prepared_weights"] = {"found": shared.found, "made": shared.made}
    return model, loaded


def _prepared(
    engine_plan: EnginePlan, groups: Groups, device: torch.device, memory: int, keeper: int
) -> Prepared | None:
    """Where prepared weights may be; memory and keeper: see `build_engine`."""
    files = stamp(engine_plan.folder)
    if keeper >= 0:
        facts = (
            *(files, __version__, torch.__version__, engine_plan.hardware, engine_plan.compute_dtype),
            *(engine_plan.config, engine_plan.topology, engine_plan.plan),
        )
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return KeptWeights(keeper, blake2b(repr(facts).encode()).hexdigest(), groups, device)
    if memory >= 0 and device.type == "cpu":
        version = f"{__version__} {engine_plan.compute_dtype} {engine_plan.plan.deterministic}"
        return SharedWeights(memory, f"{files} {version}", groups)
    return None


def _make_grammars(engine_plan: EnginePlan, model: Model | None) -> GrammarCompiler:
    shape = model.shape if model else engine_plan.description.shape
    return GrammarCompiler(engine_plan.folder, shape.vocab_size, shape.eos_token_ids)


def _make_commit(
    engine_plan: EnginePlan,
    model: Model,
    forward: Forward,
    scheduler: Scheduler,
    step_sync: StepSync,
    device: torch.device,
) -> StepCommit:
    config, vocab_size = engine_plan.config, model.shape.vocab_size
    resolves_near_ties = engine_plan.compute_dtype == "float32" and not config.deterministic
    sampler = Sampler(
        vocab_size,
        config.max_running_requests,
        device,
        report_near_ties=resolves_near_ties,
        one_by_one=config.deterministic,
    )
    masks = TokenMaskFiller(vocab_size, device)
    return StepCommit(
        model, forward, sampler, masks, scheduler, step_sync, device, resolves_near_ties=resolves_near_ties
    )


def _make_drafter(
    engine_plan: EnginePlan, model: Model, forward: Forward, kv: KVCache, step_sync: StepSync
) -> LayerDrafter | None:
    if not engine_plan.config.drafts_by_layer:
        return None
    return LayerDrafter(
        cast(DraftingModel, model),
        forward,
        kv,
        step_sync,
        num_steps=engine_plan.config.speculative_num_steps,
        max_context=engine_plan.max_context,
    )


def _make_scheduler(engine_plan: EnginePlan) -> Scheduler:
    config = engine_plan.config
    no_reuse = why_no_prefix_cache(config, engine_plan.description)
    if no_reuse:
        logger.info("no prefix is reused: %s", no_reuse)
    pools = [
        KVBlockPool(num_pages, reuse=not no_reuse, window=group.spec.window)
        for group, num_pages in zip(engine_plan.cache_groups, engine_plan.group_pages, strict=True)
    ]
    snapshots = None
    if engine_plan.num_snapshots and not no_reuse:
        first = engine_plan.num_state_slots + 1  # behind the slots of requests and of padding
        slots = range(first, first + engine_plan.num_snapshots)
        snapshots = SnapshotPool(config.state_snapshot_interval, slots)
    return Scheduler(
        KVCache(pools, engine_plan.page_size, snapshots),
        max_running=config.max_running_requests,
        chunk_tokens=engine_plan.chunk_tokens,
        prefill_tokens=config.max_prefill_tokens,
        max_context=engine_plan.max_context,
        tokens_per_request=engine_plan.budget.tokens_per_request,
        states_per_request=engine_plan.states_per_request,
        by_priority=config.scheduling_policy == "priority",
        times=StepTimes(config.target_tpot / 1000) if config.target_tpot else None,
        switch=DraftSwitch() if config.verified_tokens else None,
        delayer=None
        if engine_plan.why_no_prefill_delayer
        else PrefillDelayer(
            config.prefill_delayer_max_delay_steps, config.prefill_delayer_max_delay_ms / 1000
        ),
    )


def _make_attention(engine_plan: EnginePlan, device: torch.device) -> AttentionCaches:
    config, dtype = engine_plan.config, getattr(torch, engine_plan.compute_dtype)
    return AttentionCaches(
        [
            paged_attention(
                group,
                number=number,
                num_pages=num_pages,
                page_size=engine_plan.page_size,
                max_running=config.max_running_requests,
                max_context=engine_plan.max_context,
                device=device,
                dtype=dtype,
                drafts=engine_plan.budget.tokens_per_request - 1,
                snapshots=engine_plan.num_snapshots,
                fixed_spans=batch_invariant.SPANS if config.deterministic else 0,
                chosen=chosen,
            )
            for number, (group, num_pages, chosen) in enumerate(
                zip(
                    engine_plan.cache_groups,
                    engine_plan.group_pages,
                    engine_plan.attention_backends,
                    strict=True,
                )
            )
        ],
        [
            request_states(
                group,
                engine_plan.attention_place,
                max_running=config.max_running_requests,
                per_request=engine_plan.states_per_request,
                snapshots=engine_plan.num_snapshots,
                device=device,
                dtype=dtype,
            )
            for group in engine_plan.state_groups
        ],
    )


@cache
def _granted_threads() -> int:
    """Torch's CPU threads before an engine of this process set them."""
    return torch.get_num_threads()


def _use_threads(wanted: int, ranks: int, device: torch.device) -> int:
    """Set torch's CPU threads, and those of kernels: as wanted, or the defaults but no more than
    OMP_NUM_THREADS grants. Returns how many kernels have, or torch where there are none."""
    granted, with_gpu = _granted_threads(), device.type != "cpu"
    threads = wanted or min(granted, default_threads(ranks, with_gpu=with_gpu))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    if with_gpu or not cpu.available():
        return threads
    from turnout.kernels.cpu.threads import use_threads

    together = wanted or min(granted, kernel_threads(ranks))
    use_threads(together)
    return together
