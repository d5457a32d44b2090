"""What ranks of different hosts make of their plans."""

from dataclasses import replace

import pytest

from tests.engine.planned import write
from tests.moe.broken import offer
from tests.ranks import Rank
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.engine.ranks.rendezvous import share_plan
from turnout.errors import UserError
from turnout.moe.backends.hopper.kernels import Plain
from turnout.moe.backends.hopper.tile_config import LayerTiles
from turnout.moe.planning.runner_by_batch_size import ALL, BatchSizes, Times
from turnout.parallel.hardware import GB, Hardware


def synced(rank: Rank, configs: list[Config], memories: list[int]) -> tuple[int, int, int] | str:
    """(KV pages, longest context, bytes of KV), or why there is no agreement."""
    memory = memories[rank.number]
    host = Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=memory, present=True)
    engine_plan = resolve(configs[rank.number], host, rank=rank.number)
    config = Plain(128, 8 << rank.number, 128, 5, 4)
    tiles = ((1, LayerTiles(config, config)),)
    engine_plan = replace(engine_plan, plan=replace(engine_plan.plan, tiles=tiles))
    try:
        common = share_plan(engine_plan, rank.groups(dp_size=2, ep_size=2))
    except UserError as error:
        return str(error)
    assert common.plan.tiles[0][1].block_m == 8  # the first rank's
    return common.num_pages, common.max_context, common.memory.kv


def test_hosts_of_different_memory_keep_as_many_pages_as_all_have(ranks, tmp_path):
    """One context of 2048 tokens fits in either; 64 of them in the larger one only."""
    flags = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}
    config = write(tmp_path, **flags)
    small, large = ranks(2).run(synced, [config] * 2, [GB // 10, 8 * GB])
    alone = resolve(config, Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=GB // 10), rank=0)
    assert small == large == (alone.num_pages, alone.max_context, alone.memory.kv)
    assert alone.num_pages < resolve(config, rank=0).num_pages


def settled(rank: Rank, config: Config, measured: list[Times]) -> tuple[str, str, BatchSizes]:
    """The runner planned with this host's times, and what all agree on."""
    host = Hardware(name="cpu", device="cpu", architecture=0, memory_bytes=8 * GB, present=True)
    with pytest.MonkeyPatch.context() as patch:
        offer(patch, "Dawdles")
        engine_plan = resolve(config, host, rank=rank.number, measured=measured[rank.number])
        common = share_plan(engine_plan, rank.groups(dp_size=2, ep_size=2))
    assert common.hardware == engine_plan.hardware
    return engine_plan.plan.prefill.runner, common.plan.prefill.runner, common.plan.runner_by_batch_size


def test_hosts_that_measured_otherwise_choose_by_the_first_ones_times(ranks, tmp_path):
    config = write(tmp_path, tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True)
    first = {"torch": {1: 9.0, 64: 10.0}, "Dawdles": {1: 1.0, 64: 100.0}}
    other = {"torch": {1: 9.0, 64: 10.0}, "Dawdles": {1: 1.0, 64: 1.0}}
    sizes = ((8, "Dawdles"), (ALL, "torch"))
    assert ranks(2).run(settled, config, [first, other]) == [
        ("torch", "torch", sizes),
        ("Dawdles", "torch", sizes),
    ]


def test_ranks_that_planned_otherwise_are_told(ranks, tmp_path):
    flags = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}
    config = write(tmp_path, **flags)
    for other, what in (
        (replace(config, moe_a2a_backend="collective"), "prefill"),
        (replace(config, dtype="bfloat16"), "compute type"),
        (replace(config, page_size=32), "page size"),
    ):
        for said in ranks(2).run(synced, [config, other], [8 * GB] * 2):
            assert said.startswith(f"rank 1 planned other than rank 0, {what}:"), said
            assert "same flags" in said
