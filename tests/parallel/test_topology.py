"""Groups and ranks against sets computed the slow way; refusals against the sizes they suggest."""

import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.parallel.topology import Topology, divisors, split_address


@st.composite
def topologies(draw):
    """Valid parallel_layouts of up to 64 ranks, with one rank picked."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32, 64]))
    divisors = [d for d in range(1, tp + 1) if tp % d == 0]
    dp = draw(st.sampled_from(divisors))
    return Topology(
        tp_size=tp,
        dp_size=dp,
        ep_size=draw(st.sampled_from(divisors)),
        nnodes=draw(st.sampled_from(divisors)),
        enable_dp_attention=dp > 1,
        rank=draw(st.integers(0, tp - 1)),
    )


def test_the_example_of_the_docstring():
    ranks = [
        Topology(tp_size=8, dp_size=4, ep_size=4, enable_dp_attention=True, nnodes=2, rank=r)
        for r in range(8)
    ]
    assert [t.dp_rank for t in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [t.ep_rank for t in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [t.expert_tp_rank for t in ranks] == [0, 1] * 4
    assert [t.attention_tp_rank for t in ranks] == [0, 1] * 4
    assert [t.node for t in ranks] == [0] * 4 + [1] * 4


@given(topologies())
def test_groups_partition_the_ranks_and_agree_with_the_members(topology):
    assert topology.refusals() == []
    everyone = [replace(topology, rank=r) for r in range(topology.tp_size)]
    members = {(t.dp_rank, t.attention_tp_rank): t.rank for t in everyone}
    for dp_rank, group in enumerate(topology.attention_tp_groups()):
        assert group == [members.pop((dp_rank, place)) for place in range(topology.attention_tp)]
    assert not members
    assert sorted((t.ep_rank, t.expert_tp_rank) for t in everyone) == list(
        product(range(topology.ep_size), range(topology.expert_tp))
    )
    assert [t.node for t in everyone] == sorted(
        node for node in range(topology.nnodes) for _ in range(topology.ranks_per_node)
    )


@given(topologies(), st.integers(1, 8))
def test_each_ep_group_holds_every_expert_once(topology, per_rank):
    num_experts = per_rank * topology.ep_size
    everyone = [replace(topology, rank=r) for r in range(topology.tp_size)]
    for place in range(topology.expert_tp):
        group = [t for t in everyone if t.expert_tp_rank == place]
        assert [e for t in group for e in t.expert_range(num_experts)] == list(range(num_experts))


def test_everything_wrong_is_said_at_once():
    topology = Topology(tp_size=8, dp_size=3, ep_size=5, nnodes=16, rank=9)
    asked = [r.asked for r in topology.refusals()]
    assert len(asked) == 5  # three sizes, no --enable-dp-attention, the rank
    for flag in ("--dp-size 3", "--ep-size 5", "--nnodes 16", "rank 9"):
        assert any(flag in a for a in asked), flag
    assert all(r.remedy for r in topology.refusals())


@pytest.mark.parametrize(("tp", "ep"), [(8, 3), (6, 4), (1, 2), (12, 8)])
def test_every_size_that_a_remedy_names_works(tp, ep):
    (refusal,) = Topology(tp_size=tp, ep_size=ep).refusals()
    by_ep = re.search(r"--ep-size ([\d, or]+?)(,? or --tp-size (\d+))?$", refusal.remedy)
    assert by_ep is not None, refusal.remedy
    for size in map(int, re.findall(r"\d+", by_ep.group(1))):
        assert Topology(tp_size=tp, ep_size=size).refusals() == []
    assert by_ep.group(3) is not None
    assert Topology(tp_size=int(by_ep.group(3)), ep_size=ep).refusals() == []


def test_dense_layers_are_divided_like_attention_or_whole():
    four = Topology(tp_size=8, dp_size=2, enable_dp_attention=True)
    assert [replace(four, moe_dense_tp_size=size).dense_tp for size in (0, 1, 4)] == [4, 1, 4]
    assert [replace(four, moe_dense_tp_size=size).refusals() for size in (0, 1, 4)] == [[], [], []]
    (refusal,) = replace(four, moe_dense_tp_size=2).refusals()
    assert refusal.remedy == "use --moe-dense-tp-size 1 or 4"


def test_the_flag_of_the_head_needs_data_parallel_attention():
    assert Topology(tp_size=4, dp_size=2, enable_dp_attention=True, enable_dp_lm_head=True).refusals() == []
    (refusal,) = Topology(tp_size=4, enable_dp_lm_head=True).refusals()
    assert refusal.asked == "--enable-dp-lm-head"


def test_data_parallel_groups_need_data_parallel_attention():
    (refusal,) = Topology(tp_size=4, dp_size=2).refusals()
    assert "--enable-dp-attention" in refusal.remedy
    assert Topology(tp_size=4, dp_size=2, enable_dp_attention=True).refusals() == []


@given(st.integers(1, 5000))
def test_divisors(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("node-0.local:1", ("node-0.local", 1)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
    ],
)
def test_an_address_is_a_host_and_a_port(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "a:1:2", "[::1]", "x :1"]
)
def test_anything_else_is_no_address(address):
    assert split_address(address) is None


@given(topologies())
def test_a_description_holds_the_place_of_the_rank(topology):
    shown = topology.describe()
    assert (
        shown["attention_tp"] * shown["dp_size"] == shown["expert_tp"] * shown["ep_size"] == topology.tp_size
    )
    assert shown["dp_rank"] * shown["attention_tp"] + shown["attention_tp_rank"] == topology.rank
    assert shown["ep_rank"] * shown["expert_tp"] + shown["expert_tp_rank"] == topology.rank
    assert shown["node"] == topology.node
