"""Byte formulas against tensors that are really made, and token bounds against their definitions."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnout.formats.codec import encode
from turnout.formats.spec import FORMATS, matrix_bytes, token_bytes
from turnout.moe import budget as sizes
from turnout.moe.budget import Budget
from turnout.moe.capabilities.rank_share import DispatchShare, received_bytes
from turnout.moe.spec import Activation, MoESpec, RankShape
from turnout.parallel.groups import shares
from turnout.parallel.topology import Topology

SPEC = MoESpec(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (384, 512), (32, 64)])
def test_matrix_bytes_is_what_the_encoder_makes(weight_format, rows, columns):
    packed = encode(torch.ones(rows, columns), weight_format)
    assert matrix_bytes(weight_format, rows, columns) == packed.nbytes


@pytest.mark.parametrize("weight_format", ["bf16", "fp8", "nvfp4", "mxfp4", "int4"])
def test_a_large_matrix_costs_the_bits_the_format_table_says(weight_format):
    bits = 8 * matrix_bytes(weight_format, 4096, 4096) / 4096**2
    assert bits == pytest.approx(FORMATS[weight_format].bits_per_weight, rel=1e-5)


@pytest.mark.parametrize("weight_format", ["fp8", "nvfp4", "mxfp4", "int4"])
def test_the_groups_of_the_table_are_those_the_encoder_scales(weight_format):
    packed, spec = encode(torch.ones(256, 512), weight_format), FORMATS[weight_format]
    assert packed.scale.shape == (256 // spec.block_rows, 512 // spec.group)
    assert packed.scale.element_size() == spec.scale_bytes
    assert packed.data.shape[-1] * packed.data.element_size() * 8 == 512 * spec.bits


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("expert_tp", [1, 2])
@pytest.mark.parametrize("activation", [Activation(), Activation(kind="relu2")])
def test_expert_bytes_is_the_sum_of_the_shards(ep, expert_tp, activation):
    spec = MoESpec(
        hidden_size=256,
        intermediate_size=256,
        num_experts=8,
        top_k=2,
        activation=activation,
        expert_bias=True,
        format="nvfp4",
        quantized_activations=True,
    )
    rows, inner = (2 if activation.gated else 1) * 256 // expert_tp, 256 // expert_tp
    w13, w2 = encode(torch.ones(rows, 256), "nvfp4"), encode(torch.ones(256, inner), "nvfp4")
    biases = torch.zeros(rows).nbytes + torch.zeros(256).nbytes
    scales = 2 * torch.zeros(spec.num_experts).nbytes
    local = spec.num_experts // ep
    shard = RankShape.of(spec, num_local_experts=local, expert_tp=expert_tp)
    assert sizes.expert_bytes(spec, shard, decoded=False, itemsize=2) == (
        local * (w13.nbytes + w2.nbytes + biases) + scales
    )
    plain = (rows * 256 + 256 * inner) * 4
    assert sizes.expert_bytes(spec, shard, decoded=True, itemsize=4) == local * (plain + biases) + scales


def test_token_bytes():
    assert token_bytes("bf16", 7168) == 14336
    assert token_bytes("bf16", 7168, itemsize=4) == 28672
    assert token_bytes("fp8", 7168) == 7168 + 4 * 56
    assert token_bytes("nvfp4", 7168) == 3584 + 448


def test_an_all_to_all_at_scale_takes_gigabytes_and_batched_experts_more():
    """EP 32, C 8192, H 7168: the figure that makes it worth showing before anything is allocated."""
    spec = MoESpec(hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8)
    rows = 32 * 8192
    share = DispatchShare(
        layout="tokens", rows=rows, shape=RankShape.of(spec, num_local_experts=8), wire_format="fp8"
    )
    tokens = received_bytes(share)
    assert tokens == 32 * 8192 * (7168 + 4 * 7168 // 128 + 2 * 7168 + 8 * 8)
    assert 5e9 < tokens < 6e9
    batched = received_bytes(replace(share, layout="batched_experts"))
    assert batched == tokens + 7 * rows * (7168 + 4 * 7168 // 128 + 2 * 7168)


def test_bounds_follow_from_limits():
    plain = Budget.from_limits(chunked_prefill_size=512, max_prefill_tokens=2048, max_running_requests=64)
    assert (plain.local, plain.decode, plain.gathered, plain.capacity) == (2048, 64, 2048, 2048)
    crowded = Budget.from_limits(
        chunked_prefill_size=128,
        max_prefill_tokens=128,
        max_running_requests=100,
        draft_tokens=4,
        dp_size=8,
    )
    assert (crowded.tokens_per_request, crowded.decode, crowded.local) == (4, 400, 400)
    assert crowded.gathered == crowded.received == 3200
    settling = Budget.from_limits(
        chunked_prefill_size=16, max_prefill_tokens=16, max_running_requests=8, near_tie_tokens=64
    )
    assert (settling.local, settling.decode, settling.capacity) == (64, 8, 64)


@given(
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.integers(1, 1_000),
    st.integers(0, 8),
    st.integers(1, 64),
    st.integers(0, 20_000),
)
def test_capacity_is_enough_or_refused_with_a_value_that_is(chunk, prefill, running, draft, dp, cap):
    limits = {
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": prefill,
        "max_running_requests": running,
        "draft_tokens": draft,
        "dp_size": dp,
    }
    budget = Budget.from_limits(**limits, max_dispatch_tokens_per_rank=cap)
    assert budget.local >= max(chunk, prefill, running)
    assert budget.decode <= budget.local
    refusals = budget.refusals()
    assert bool(refusals) == (0 < cap < budget.local)
    if refusals:
        suggested = int(refusals[0].remedy.split("--max-dispatch-tokens-per-rank ")[1].split()[0])
        assert Budget.from_limits(**limits, max_dispatch_tokens_per_rank=suggested).refusals() == []
        assert Budget.from_limits(**limits, max_dispatch_tokens_per_rank=suggested - 1).refusals()


def test_rows_seen_by_exchange():
    limits = {"chunked_prefill_size": 8, "max_prefill_tokens": 8, "max_running_requests": 4, "dp_size": 2}
    needed = Budget.from_limits(**limits)
    asked = Budget.from_limits(**limits, max_dispatch_tokens_per_rank=20)
    seen = {
        (exchange, phase): (sizes.rows_seen(exchange, phase, needed), sizes.rows_seen(exchange, phase, asked))
        for exchange in ("gather", "all_to_all")
        for phase in ("prefill", "decode")
    }
    assert seen == {
        ("gather", "prefill"): (16, 16),
        ("gather", "decode"): (8, 8),
        ("all_to_all", "prefill"): (16, 40),
        ("all_to_all", "decode"): (8, 8),
    }
    assert (asked.gathered, asked.received) == (16, 40)


def test_a_gather_moves_tokens_between_groups_only():
    assert not sizes.moves("gather", dp_size=1)
    assert sizes.moves("gather", dp_size=2)
    assert sizes.moves("all_to_all", dp_size=1)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_no_receiver_of_an_all_to_all_gets_more_rows_than_planned(tp):
    """Every rank sends its share of its group's tokens to each rank with a part of an expert they chose.

    Routed at random, and all to one expert: then the bound is met.
    """
    draw = random.Random(tp)
    divisors = [d for d in (1, 2, 4, 8) if tp % d == 0]
    for dp, ep, skewed in product(divisors, divisors, (False, True)):
        T = 13
        budget = Budget.from_limits(
            chunked_prefill_size=T, max_prefill_tokens=T, max_running_requests=4, dp_size=dp
        )
        received = [0] * tp
        for rank in range(tp):
            topology = Topology(tp_size=tp, dp_size=dp, ep_size=ep, enable_dp_attention=dp > 1, rank=rank)
            for _ in range(shares(T, topology.attention_tp)[topology.attention_tp_rank]):
                chosen = {0, 1} if skewed else set(draw.sample(range(16), 2))
                for other in range(tp):
                    received[other] += bool(chosen & set(replace(topology, rank=other).expert_range(16)))
        most = sizes.rows_seen("all_to_all", "prefill", budget)
        assert max(received) <= most
        assert not skewed or max(received) == most
