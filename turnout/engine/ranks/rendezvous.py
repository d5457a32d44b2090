"""How the ranks of one model come together: their groups, and the exchange before each step."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from itertools import product
from pathlib import Path

import torch

from turnout.config import Config, Launched
from turnout.engine.cuda_graph_policy import graph_sizes, prefill_graph_sizes
from turnout.engine.engine_plan import EnginePlan, resolve
from turnout.engine.memory_plan import whole_host
from turnout.engine.ranks.step_sync import StepSync
from turnout.errors import UserError
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.plan import PHASES
from turnout.parallel.exchange import SharedExchange
from turnout.parallel.group_exchange import GroupExchange, gather_values
from turnout.parallel.groups import Groups, connect


def rendezvous(engine_plan: EnginePlan, *, init_method: str) -> tuple[Groups, StepSync]:
    """Join the other ranks of `engine_plan`; collective. A single rank has none to join.

    init_method: see `parallel.groups.connect`.
    """
    topology = engine_plan.topology
    for part, phase in product(engine_plan.plan.parts, PHASES):
        os.environ.update(DISPATCHERS[part.phase(phase).dispatcher].environment)
    device = torch.device(engine_plan.hardware.device)
    if device.type == "cuda":
        device = torch.device("cuda", topology.rank % topology.ranks_per_node)
        torch.cuda.set_device(device)
    fixed_order = engine_plan.config.deterministic
    groups = connect(topology, init_method=init_method, device=device, fixed_order=fixed_order)
    if topology.tp_size == 1:
        return groups, StepSync(topology)
    if topology.nnodes > 1:
        return groups, StepSync(topology, GroupExchange(groups.world))
    return groups, StepSync(topology, _share(groups))


def _share(groups: Groups) -> SharedExchange:
    """The exchange of one host's ranks, through a file without a name once all have it open."""
    world = groups.world
    descriptor, own = tempfile.mkstemp(prefix="turnout-steps-") if world.rank == 0 else (-1, "")
    path = Path(gather_values(world, own)[0])
    exchange = SharedExchange(path, world.rank, world.size)
    gather_values(world, None)  # all have it open
    if world.rank == 0:
        os.close(descriptor)
        path.unlink()
    return exchange


def share_plan(engine_plan: EnginePlan, groups: Groups) -> EnginePlan:
    """`engine_plan` with what all ranks share; collective. That is as many KV pages as each of them has, for
    hosts differ in memory, and the first one's tilings and runners, for hosts may differ in what was tuned on
    them.

    Raises UserError if ranks planned what they must do alike differently.
    """
    if groups.world.size == 1:
        return engine_plan
    measured = gather_values(groups.world, engine_plan.measured)[0]
    if measured != engine_plan.measured:
        host = whole_host(engine_plan.hardware, engine_plan.topology)
        engine_plan = resolve(engine_plan.config, host, rank=groups.world.rank, measured=measured)
    plan = engine_plan.plan
    planned: dict[str, object] = {
        "model": engine_plan.description,
        "compute type": engine_plan.compute_dtype,
        "token bounds": engine_plan.budget,
        "page size": engine_plan.page_size,
        "prefill": plan.prefill,
        "decode": plan.decode,
        "runners by batch size": plan.runner_by_batch_size,
        "activations": plan.activation_format,
        "shared expert": plan.shared_expert,
        "decode graphs": engine_plan.why_no_decode_graphs or graph_sizes(engine_plan.config),
        "prefill graphs": engine_plan.why_no_prefill_graphs or prefill_graph_sizes(engine_plan.budget),
    }
    draft = plan.draft
    if draft:
        planned["draft layer"] = draft.prefill, draft.decode, draft.activation_format, draft.shared_expert
    tiles = [part.tiles for part in plan.parts]
    everyone = gather_values(groups.world, (engine_plan.num_pages, tiles, planned))
    _, tiles, first = everyone[0]
    for rank, (_, _, theirs) in enumerate(everyone):
        for what, value in theirs.items():
            if value != first[what]:
                raise UserError(
                    f"rank {rank} planned other than rank 0, {what}: {value} and {first[what]}; start all "
                    "hosts with the same flags, checkpoint, packages and kind of device"
                )
    synced = engine_plan.with_pages(min(pages for pages, _, _ in everyone))
    draft = draft and dataclasses.replace(draft, tiles=tiles[-1])
    return dataclasses.replace(synced, plan=dataclasses.replace(plan, tiles=tiles[0], draft=draft))


def check_launch(config: Config, launched: Launched | None) -> None:
    """Raise UserError unless as many processes were started, on as many hosts, as `config` has ranks."""
    size = launched.size if launched else 1
    if config.tp_size != size and launched is None:
        raise UserError(
            f"--tp-size {config.tp_size}: this is one process, and each rank needs its own; use `turnout "
            "generate` or `turnout serve`, which start them, or start this script with `torchrun "
            f"--nproc-per-node {config.tp_size // config.nnodes}`"
        )
    if config.tp_size != size:
        raise UserError(
            f"--tp-size {config.tp_size}, but {size} processes were started (WORLD_SIZE): use --tp-size "
            f"{size}, or start {config.tp_size}"
        )
    hosts = launched.size // launched.ranks_per_node if launched else 1
    if config.nnodes != hosts:
        raise UserError(
            f"--nnodes {config.nnodes}, but the processes were started on {hosts} hosts (WORLD_SIZE over "
            f"LOCAL_WORLD_SIZE): use --nnodes {hosts}"
        )
