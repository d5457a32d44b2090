"""Dispatcher "nvlink" in a plan, and what it says to ranks and callers that do not fit together.

Its kernels: tests/kernels/nvlink/test_nvlink.py. Between GPUs: test_nvlink_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.build import make_plan, make_setup, make_spec
from tests.ranks import Pools, Rank
from turnout.errors import PlanRefused, UserError
from turnout.moe.backends.nvlink.all_to_all import Regions
from turnout.moe.budget import Budget
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.plan import PlanRequest, plan
from turnout.parallel import hardware
from turnout.parallel.topology import Topology

CPU = torch.device("cpu")
H200 = hardware.named("h200")


def planned(
    ranks: int = 8,
    dp: int = 8,
    tokens: int = 100,
    device=H200,
    nnodes: int = 1,
    request: PlanRequest = PlanRequest(moe_a2a_backend="nvlink"),
    capacity: int = 0,
    **fields,
):
    budget = Budget.from_limits(
        chunked_prefill_size=tokens,
        max_prefill_tokens=tokens,
        max_running_requests=16,
        dp_size=dp,
        max_dispatch_tokens_per_rank=capacity,
    )
    return plan(
        make_spec(**({"hidden_size": 7168, "num_experts": 256, "top_k": 8} | fields)),
        topology=Topology(
            tp_size=ranks, dp_size=dp, ep_size=ranks, enable_dp_attention=dp > 1, nnodes=nnodes
        ),
        budget=budget,
        hardware=device,
        request=request,
        compute_dtype="bfloat16",
    )


def test_memory_is_counted():
    """Rows of 8 ranks x 100 tokens: a token and its result of 14336 bytes, twice, as all may be sent in
    words; 64 of ids and weights three times over, two flags of 8 bytes; and counts."""
    found = planned()
    assert found.decode.max_tokens == 8 * 16
    assert found.prefill.max_tokens == 800
    assert found.dispatch_bytes == 800 * (4 * 14336 + 3 * 64 + 2 * 8) + 128
    more = 800 * (2 * 14336 + 3 * 64 + 2 * 8)
    assert planned(tokens=200).dispatch_bytes == 2 * more + 8 * 128 * 2 * 14336 + 128
    in_turns = planned(request=PlanRequest(moe_a2a_backend="nvlink", enable_two_batch_overlap=True))
    assert in_turns.dispatch_bytes == 2 * found.dispatch_bytes
    back = planned(request=PlanRequest(moe_a2a_backend="nvlink", moe_combine_dtype="fp8"))
    assert found.dispatch_bytes - back.dispatch_bytes == 800 * 2 * (14336 - 7168 - 4 * 56)
    assert found.decode.reduce == "none"


def test_groups_that_share_tokens_have_equal_shares():
    """101 tokens of two ranks: 51 rows for each."""
    assert planned(dp=4, tokens=101).prefill.max_tokens == 4 * 2 * 51


def test_prompts_larger_than_buffers_pass_in_chunks():
    found = planned(tokens=5000, capacity=2000)
    assert (found.prefill.chunk, found.decode.chunk) == (2000, 0)
    assert found.prefill.max_tokens == 8 * 2000
    assert found.dispatch_bytes == planned(tokens=2000).dispatch_bytes
    assert any("chunks of at most 2000 tokens of a rank, up to 3" in reason for reason in found.reasons)
    assert planned(tokens=5000, capacity=5000).prefill.chunk == 0
    with pytest.raises(PlanRefused, match=r"--max-dispatch-tokens-per-rank 15: .* in one step of decoding"):
        planned(tokens=5000, capacity=15)
    with pytest.raises(PlanRefused, match="use --max-dispatch-tokens-per-rank 5000 or more"):
        planned(tokens=5000, capacity=2000, request=PlanRequest(moe_a2a_backend="collective"))


@pytest.mark.parametrize(
    ("capacity", "inner", "takes", "chunk"),
    [
        (4000, 64, "nvlink", 4000),
        (400, 64, "nvlink", 400),
        (4000, 2048, "nvlink", 4000),
        (400, 2048, "none", 0),
    ],
)
def test_they_are_gathered_where_chunks_cost_more(capacity: int, inner: int, takes: str, chunk: int):
    """Experts that are read 20 times, of 2.8 GB, take longer than a gather."""
    found = planned(tokens=8000, capacity=capacity, request=PlanRequest(), intermediate_size=inner)
    assert (found.prefill.dispatcher, found.prefill.chunk) == (takes, chunk)
    assert found.decode.dispatcher == "nvlink"
    other = {"nvlink": "none", "none": "nvlink"}[takes]
    (line,) = [reason for reason in found.reasons if "by what was measured" in reason]
    assert f"8000 tokens of a rank there and back by {takes}: " in line
    assert f"{other} " in line.partition("before")[2]


def test_a_region_that_does_not_fit_may_be_smaller_than_a_step():
    with pytest.raises(PlanRefused) as refused:
        planned(tokens=500_000)
    remedies = [r.remedy for r in refused.value.refusals if r.who.endswith("dispatcher nvlink")]
    most = max(int(r.partition("use --max-dispatch-tokens-per-rank ")[2].split()[0]) for r in remedies)
    assert planned(tokens=500_000, capacity=most).prefill.chunk == most
    with pytest.raises(PlanRefused):
        planned(tokens=500_000, capacity=most + 1)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        (
            {"request": PlanRequest(moe_a2a_backend="none", moe_combine_dtype="fp8")},
            "brings results back in bf16",
        ),
        (
            {"request": PlanRequest(moe_a2a_backend="flashinfer", moe_combine_dtype="fp8")},
            "brings results back in bf16",
        ),
        (
            {"request": PlanRequest(moe_a2a_backend="none", moe_combine_dtype="fp8"), "dp": 1},
            "every rank has them all",
        ),
        (
            {"request": PlanRequest(moe_combine_dtype="fp8"), "hidden_size": 7232},
            "fp8 needs a multiple of 128",
        ),
    ],
)
def test_results_in_fp8_are_refused_where_they_cannot_be(fields, limit):
    with pytest.raises(PlanRefused) as refused:
        planned(**fields)
    said = [r for r in refused.value.refusals if r.asked.startswith("--moe-combine-dtype fp8")]
    assert said
    assert any(limit in r.limit for r in said)
    assert all("use --moe-combine-dtype auto" in r.remedy for r in said)
    assert planned(request=PlanRequest(moe_combine_dtype="fp8")).decode.combine_format == "fp8"


@pytest.mark.parametrize(
    ("fields", "limit", "remedy"),
    [
        ({"device": hardware.named("cpu")}, "runs on cuda", "choose another --moe-a2a-backend"),
        ({"nnodes": 2}, "works within one host", "--nnodes 1, or --moe-a2a-backend collective or none"),
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
    spec, kind = make_spec(), DISPATCHERS.load("nvlink")
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


def test_a_batch_in_chunks_takes_the_region_that_is_free():
    regions = Regions(each=(None, None))
    first, second = regions.next(), regions.next()
    for _ in range(3):  # chunks of the first batch, while the second one's stays away
        regions.away.discard(first)
        assert regions.next() == first != second


def replace_tokens(made, tokens: int):
    phases = {name: replace(made.phase(name), max_tokens=tokens) for name in ("prefill", "decode")}
    return replace(made, **phases)


def test_ranks_and_callers_that_exceed_it_are_told(ranks: Pools):
    first, _ = ranks(2).run(unequal)
    assert "9 tokens of a data-parallel rank" in first
