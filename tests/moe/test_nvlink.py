"""Dispatcher "nvlink" in a plan, and what it says to ranks and callers that do not fit together.

Its kernels: tests/kernels/test_nvlink.py. Between GPUs: test_nvlink_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.build import make_plan, make_setup, make_spec
from tests.ranks import Pools, Rank
from turnout.errors import PlanRefused, UserError
from turnout.moe.budget import Budget
from turnout.moe.exchange.one_sided import Regions
from turnout.moe.plan import Wishes, plan
from turnout.parallel import hardware
from turnout.parallel.topology import Topology
from turnout.registry import DISPATCHERS

CPU = torch.device("cpu")
H200 = hardware.named("h200")


def planned(
    ranks: int = 8,
    dp: int = 8,
    tokens: int = 100,
    device=H200,
    nnodes: int = 1,
    two_batches: bool = False,
    **fields,
):
    budget = Budget.from_limits(
        chunked_prefill_size=tokens, max_prefill_tokens=tokens, max_running_requests=16, dp_size=dp
    )
    return plan(
        make_spec(hidden_size=7168, num_experts=256, top_k=8, **fields),
        topology=Topology(
            tp_size=ranks, dp_size=dp, ep_size=ranks, enable_dp_attention=dp > 1, nnodes=nnodes
        ),
        budget=budget,
        hardware=device,
        wishes=Wishes(dispatcher="nvlink", two_batches=two_batches),
        compute_dtype="bfloat16",
    )


def test_memory_is_counted():
    """Rows of 8 ranks x 100 tokens: a token and its result of 14336 bytes, twice, for those may all travel in
    words; 64 of ids and weights three times over, two flags of 8 bytes; and counts."""
    found = planned()
    assert found.decode.max_tokens == 8 * 16
    assert found.prefill.max_tokens == 800
    assert found.dispatch_bytes == 800 * (4 * 14336 + 3 * 64 + 2 * 8) + 128
    more = 800 * (2 * 14336 + 3 * 64 + 2 * 8)
    assert planned(tokens=200).dispatch_bytes == 2 * more + 8 * 128 * 2 * 14336 + 128
    assert planned(two_batches=True).dispatch_bytes == 2 * found.dispatch_bytes
    assert found.decode.reduce == "none"


def test_groups_that_share_tokens_have_equal_shares():
    """101 tokens of two ranks: 51 rows for each."""
    assert planned(dp=4, tokens=101).prefill.max_tokens == 4 * 2 * 51


@pytest.mark.parametrize(
    ("fields", "limit", "remedy"),
    [
        ({"device": hardware.named("cpu")}, "runs on cuda", "--moe-a2a-backend"),
        ({"nnodes": 2}, "works within one host", "--nnodes 1"),
        ({"device": replace(H200, peer_access=False)}, "each other's memory", "--moe-a2a-backend collective"),
        ({"device": hardware.named("a100")}, "has kernels for 10.0, 10.3, 9.0", "--moe-a2a-backend"),
    ],
)
def test_where_it_cannot_work_it_says_why_and_what_can(fields, limit, remedy):
    with pytest.raises(PlanRefused) as refused:
        planned(**fields)
    said = [r for r in refused.value.refusals if r.who == "dispatcher nvlink" and limit in r.limit]
    assert remedy in said[0].remedy


def unequal(rank: Rank) -> str:
    """Ranks whose flags differ; then one that is handed more than it planned for."""
    groups = rank.groups(dp_size=2, ep_size=2)
    spec, kind = make_spec(), DISPATCHERS.get("nvlink")
    made = make_plan(spec, dispatcher="nvlink", first=4 * rank.number, count=4, max_tokens=16)
    with pytest.raises(UserError, match=r"--max-dispatch-tokens-per-rank .* rank 0: 8, rank 1: 9"):
        kind(make_setup(spec, replace_tokens(made, 16 + 2 * rank.number), groups=groups))
    dispatcher = kind(make_setup(spec, made, groups=groups))
    same = kind(make_setup(spec, made, "prefill", groups=groups))
    assert same.exchange._regions is dispatcher.exchange._regions
    x_TH, ids_TK = torch.zeros(9, spec.hidden_size), torch.zeros(9, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="buffers hold 8") as told:
        dispatcher.dispatch(x_TH, ids_TK, torch.zeros(9, 2), [9, 9])
    return str(told.value)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_batch_that_never_came_back_is_an_error(batches: int):
    """Before the next one is sent over what may still be in use."""
    regions = Regions(each=(None,) * batches)
    for _ in range(2 * batches):
        regions.away.discard(regions.next())
    under_way = [regions.next() for _ in range(batches)]
    assert sorted(under_way) == list(range(batches))
    with pytest.raises(RuntimeError, match="not followed by its combine"):
        regions.next()


def replace_tokens(made, tokens: int):
    phases = {name: replace(made.phase(name), max_tokens=tokens) for name in ("prefill", "decode")}
    return replace(made, **phases)


def test_ranks_and_callers_that_exceed_it_are_told(ranks: Pools):
    first, _ = ranks(2).run(unequal)
    assert "9 tokens of a data-parallel rank" in first
