"""Two processes on gloo: the layer that owes the sum over ranks reduces exactly once."""

from __future__ import annotations

import torch
import torch.multiprocessing as mp

from tests.moe.bounds import relative_error
from tests.moe.build import expert_slice, make_experts, make_plan, make_spec
from turnout.moe import MoELayer
from turnout.parallel.groups import connect, disconnect
from turnout.parallel.topology import Topology

WORLD = 2


def inputs():
    draw = torch.Generator().manual_seed(4)
    spec = make_spec("swiglu")
    return (
        spec,
        torch.randn(spec.num_experts, spec.hidden_size, generator=draw),
        [torch.randn(tokens, spec.hidden_size, generator=draw) for tokens in (0, 1, 9)],
    )


def rank_main(rank: int, store: str, results) -> None:
    torch.set_num_threads(1)
    spec, router, batches = inputs()
    topology = Topology(tp_size=WORLD, ep_size=WORLD, rank=rank)
    groups = connect(topology, init_method=f"file://{store}", device=torch.device("cpu"))
    held = topology.expert_range(spec.num_experts)
    layer = MoELayer(
        spec,
        make_plan(spec, first=held.start, count=len(held), reduce="layer", shared_expert="sharded"),
        router_weight=router,
        experts=expert_slice(make_experts(spec), held.start, len(held)),
        shared_expert=(lambda x: x / WORLD),  # a shard of the identity
        groups=groups,
    )
    results.put((rank, [layer(x).numpy() for x in batches]))
    disconnect()


def test_every_rank_gets_the_whole_sum(tmp_path):
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, str(tmp_path / "store"), results))
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(timeout=30)
        assert process.exitcode == 0
    spec, router, batches = inputs()
    whole = MoELayer(
        spec,
        make_plan(spec),
        router_weight=router,
        experts=make_experts(spec),
        shared_expert=lambda x: x,
    )
    for i, x in enumerate(batches):
        for rank in range(WORLD):
            assert relative_error(torch.from_numpy(found[rank][i]), whole(x)) < 1e-5
