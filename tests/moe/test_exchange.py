"""The layer between ranks, through every dispatcher, in every format and parallel layout.

Sizes of 1 to 8 ranks; all cases of one parallel layout run in one pool. tests/moe/exchange.py has them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.bounds import relative_error
from tests.moe.build import MAX_TOKENS, make_experts, make_plan, make_setup, make_spec
from tests.moe.exchange import LOCAL_DISPATCHERS, Case, cases, held, inputs, run
from tests.ranks import Pools, Rank, RankPool
from turnout.formats.spec import token_bytes
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.reference import experts_reference
from turnout.moe.wire_format import Wire

PARALLEL_LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), pytest.param(4, 2, marks=pytest.mark.more)]
LAYOUTS = {name: DISPATCHERS[name].layout for name in LOCAL_DISPATCHERS}


@pytest.mark.parametrize(("ep", "tp"), PARALLEL_LAYOUTS)
@pytest.mark.parametrize("dispatcher", LOCAL_DISPATCHERS)
def test_the_layer_against_the_reference(ranks: Pools, dispatcher, ep, tp):
    check(ranks(ep * tp), list(cases(dispatcher, ep, tp)), thorough=ep * tp <= 2)


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("dispatcher", LOCAL_DISPATCHERS)
def test_the_same_over_gloo(ranks: Pools, dispatcher, ep, tp):
    check(ranks(ep * tp), list(cases(dispatcher, ep, tp, shared_memory=False)), thorough=False)


def check(pool: RankPool, some: list[Case], *, thorough: bool) -> None:
    found = [finding for own in pool.run(run, some, thorough) for finding in own]
    bad = [finding for finding in found if not finding.good]
    assert not bad, "\n".join(map(str, bad[:5]))
    assert {finding.case for finding in found} == set(some)
    assert len(found) >= 2 * 3 * len(some)  # phases and batches


def built(rank: Rank, dispatcher: str):
    """A dispatcher and a runner with this rank's experts, of a small layer over all ranks."""
    groups, spec = rank.groups(dp_size=rank.size, ep_size=rank.size), make_spec("swiglu")
    topology = groups.topology
    span = topology.expert_range(spec.num_experts)
    chosen = make_plan(
        spec, dispatcher=dispatcher, layout=LAYOUTS[dispatcher], first=span.start, count=len(span)
    )
    runner = RUNNERS.load("torch")(spec, chosen, torch.device("cpu"))
    runner.prepare(held(make_experts(spec), topology))
    return DISPATCHERS.load(dispatcher)(make_setup(spec, chosen, groups=groups)), runner


def padded(rank: Rank, dispatcher: str) -> None:
    """Rows of padding hold anything; among the others, between them, or alone on a rank."""
    sends, runner = built(rank, dispatcher)
    experts, tokens = make_experts(make_spec("swiglu")), [5, 3, 0, 2][: rank.size]
    for paddings in ((), (0, 2), range(5)):
        x_TH = inputs(tokens[rank.number], rank.number)
        ids_TK = torch.randint(0, 8, (len(x_TH), 2), dtype=torch.int32)
        ids_TK[:, 1] = (ids_TK[:, 0] + 1 + rank.number) % 8
        weights_TK = torch.rand(len(x_TH), 2)
        gone = [row for row in paddings if row < len(x_TH) and rank.number < 2]
        x_TH[gone], ids_TK[gone], weights_TK[gone] = torch.nan, -1, 0
        batch, state = sends.dispatch(x_TH, ids_TK, weights_TK, tokens)
        y_TH = sends.combine(runner(batch), state)
        ref_TH = experts_reference(
            x_TH.nan_to_num(), ids_TK, weights_TK, experts, make_spec("swiglu").activation
        )
        assert relative_error(y_TH, ref_TH) < 1e-5
        assert not y_TH[gone].any()


@pytest.mark.parametrize("dispatcher", LOCAL_DISPATCHERS)
def test_padding_comes_out_as_zero(ranks: Pools, dispatcher):
    ranks(4).run(padded, dispatcher)


def received(rank: Rank) -> tuple[list[list[float]], list[list[int]]]:
    """What arrives on ranks with an equal part of 8 experts each, from all of them."""
    sends, _ = built(rank, "collective")
    ids_TK = torch.tensor([[0, 1], [3, 4], [6, 5], [-1, -1]], dtype=torch.int32)
    x_TH = torch.arange(4.0).unsqueeze(1).expand(4, 128) + 10 * rank.number
    batch, _ = sends.dispatch(x_TH, ids_TK, torch.ones(4, 2), (4,) * rank.size)
    return batch.hidden.data[:, 0].tolist(), batch.topk_ids.tolist()


def test_a_token_goes_once_to_each_rank_it_needs(ranks: Pools):
    """Top-2 over 4 ranks: 44 % of them."""
    first, second, third, fourth = ranks(4).run(received)
    assert first == ([0, 10, 20, 30], 4 * [[0, 1]])
    assert second == ([1, 11, 21, 31], 4 * [[3, 4]])
    assert third == ([1, 2, 11, 12, 21, 22, 31, 32], 4 * [[3, 4], [6, 5]])
    assert fourth == ([2, 12, 22, 32], 4 * [[6, 5]])


def test_a_token_goes_everywhere_if_most_ranks_need_it(ranks: Pools):
    """Top-2 over 2 ranks: 75 % of them."""
    everything = ([0, 1, 2, 3, 10, 11, 12, 13], 2 * [[0, 1], [3, 4], [6, 5], [-1, -1]])
    assert ranks(2).run(received) == [everything] * 2


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_rows_arrive_as_they_were_packed(format, dtype, top_k):
    spec = make_spec(top_k=top_k)
    chosen = make_plan(spec, compute_dtype=dtype)
    chosen = replace(chosen, decode=replace(chosen.decode, wire_format=format))
    wire = Wire(make_setup(spec, chosen, input_scale=torch.tensor(0.01)))
    x_TH = torch.randn(5, spec.hidden_size).to(getattr(torch, dtype))
    ids_TK = torch.randint(0, 8, (5, top_k), dtype=torch.int32)
    weights_TK = torch.rand(5, top_k)
    rows_TW = wire.pack(x_TH, ids_TK, weights_TK, 7)
    payload = token_bytes(format, spec.hidden_size, itemsize=x_TH.itemsize) + 8 * top_k
    assert payload <= rows_TW.nbytes / 7 < payload + 4 * 8  # parts begin at words
    batch, sent = wire.unpack(rows_TW), wire.encode(x_TH)
    assert batch.topk_ids.tolist() == [*ids_TK.tolist(), [-1] * top_k, [-1] * top_k]
    assert torch.equal(batch.topk_weights, torch.cat((weights_TK, torch.zeros(2, top_k))))
    assert (batch.hidden.format, batch.hidden.data.dtype) == (format, sent.data.dtype)
    for got, want in ((batch.hidden.data, sent.data), (batch.hidden.scale, sent.scale)):
        assert (got is None) == (want is None)
        if want is not None:
            assert torch.equal(got[:5].float(), want.float())
            assert not got[5:].float().any()


def test_nvfp4_on_the_wire_needs_a_scale():
    spec = make_spec()
    chosen = make_plan(spec)
    chosen = replace(chosen, decode=replace(chosen.decode, wire_format="nvfp4"))
    with pytest.raises(ValueError, match="input scales"):
        Wire(make_setup(spec, chosen))


@pytest.mark.parametrize("dispatcher", LOCAL_DISPATCHERS)
def test_a_single_rank_needs_no_process_group(dispatcher):
    spec, experts = make_spec("swiglu"), make_experts(make_spec("swiglu"))
    chosen = make_plan(spec, dispatcher=dispatcher, layout=LAYOUTS[dispatcher])
    runner = RUNNERS.load("torch")(spec, chosen, torch.device("cpu"))
    runner.prepare(experts)
    sends = DISPATCHERS.load(dispatcher)(make_setup(spec, chosen, "prefill"))
    for tokens in (0, 1, MAX_TOKENS):
        x_TH = inputs(tokens, 0)
        ids_TK = torch.arange(2 * tokens, dtype=torch.int32).view(-1, 2) % 8
        batch, state = sends.dispatch(x_TH, ids_TK, torch.ones(tokens, 2), (tokens,))
        ref_TH = experts_reference(x_TH, ids_TK, torch.ones(tokens, 2), experts, spec.activation)
        assert relative_error(sends.combine(runner(batch), state), ref_TH) < 1e-5
