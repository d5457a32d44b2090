"""Two runners in turn by the number of tokens: when plans take a second one, and what it then computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.moe.broken import BROKEN, offer
from tests.moe.build import make_experts, make_plan, make_spec
from tests.moe.made_up import CPU, dispatcher, make, runner
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.layer import MoELayer
from turnout.moe.plan import MoEPlan, PlanRequest
from turnout.moe.planning.runner_by_batch_size import ALL
from turnout.moe.reference import experts_reference
from turnout.moe.routing import route
from turnout.moe.runner_by_batch_size import RunnerByBatchSize, make_runner
from turnout.parallel.hardware import GB

TIMES = {"oak": {1: 10.0, 16: 100.0, 256: 3000.0}, "elm": {1: 40.0, 16: 95.0, 256: 450.0}}


def planned(measured=TIMES, elm: dict | None = None, **given) -> MoEPlan:
    runners = [runner("oak", preference=10), runner("elm", **(elm or {})), runner("fir")]
    return make(runners=runners, measured=measured, **given)


def test_the_faster_at_a_size_takes_batches_of_it():
    """In the mean elm is the better; oak is 4 times as fast at one token."""
    plan = planned()
    assert (plan.prefill.runner, plan.decode.runner) == ("elm", "elm")
    assert plan.runner_by_batch_size == ((4, "oak"), (ALL, "elm"))  # between 1 and 16 the nearer as a ratio
    assert plan.runners == ("elm", "oak")
    alone = planned(measured={"elm": TIMES["elm"]})
    assert plan.weight_bytes == 2 * alone.weight_bytes
    assert plan.workspace_bytes == 2 * alone.workspace_bytes
    line = next(line for line in plan.reasons if line.startswith("batches of"))
    assert line.startswith("batches of 1 to 4 by oak, 5 tokens and more by elm: measured up to 4.00 times")


@pytest.mark.parametrize(
    "given",
    [
        {"measured": {}},
        {"measured": {"oak": {1: 10.0}, "elm": {1: 9.5}}},  # not worth it
        {"measured": {"oak": {1: 10.0}, "elm": {4: 1.0}}},  # no size in common
        {"request": PlanRequest(moe_runner_backend="oak")},
        {
            "request": PlanRequest(moe_weight_storage="packed"),
            "elm": {"weight_storages": frozenset({"decoded"})},
        },
        {"hardware": replace(CPU, memory_bytes=GB)},  # room for one copy only
    ],
)
def test_one_runner_does_where_a_second_gains_nothing_or_cannot(given: dict):
    assert planned(**given).runner_by_batch_size == ()


def test_a_deterministic_plan_has_one_runner():
    invariant = {"batch_invariant": True}
    plan = make(
        runners=[runner("oak", **invariant), runner("elm", **invariant)],
        measured=TIMES,
        request=PlanRequest(deterministic=True),
        dispatchers=[dispatcher(**invariant)],
    )
    assert plan.runner_by_batch_size == ()


def test_batches_go_to_the_runner_for_their_size(monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, "MindsCompany")
    spec = make_spec()
    plan = replace(make_plan(spec), runner_by_batch_size=((4, "torch"), (ALL, "MindsCompany")))
    experts = make_experts(spec)
    both = make_runner(spec, plan, torch.device("cpu"))
    assert isinstance(both, RunnerByBatchSize)
    both.prepare(experts)
    called = []
    monkeypatch.setattr(BROKEN["MindsCompany"], "__call__", watched(BROKEN["MindsCompany"], called))
    draw = torch.Generator().manual_seed(1)
    for tokens in (0, 1, 4, 5, 17):
        weights_TK, ids_TK = torch.rand(tokens, spec.num_experts, generator=draw).topk(spec.top_k)
        x_TH = torch.randn(tokens, spec.hidden_size, generator=draw)
        batch = TokensBatch(hidden=Hidden(data=x_TH), topk_ids=ids_TK.int(), topk_weights=weights_TK)
        wanted_TH = experts_reference(x_TH, ids_TK, weights_TK, experts, spec.activation)
        assert torch.allclose(both(batch), wanted_TH, atol=1e-4)
    assert called == [5, 17]
    assert both.same_bits(2).stop <= 5 <= both.same_bits(9).start
    assert make_runner(spec, make_plan(spec), torch.device("cpu")).__class__.__name__ == "TorchRunner"


def watched(cls, called: list[int]):
    own = cls.__call__

    def call(self, batch):
        called.append(len(batch.topk_ids))
        return own(self, batch)

    return call


def test_a_runner_that_takes_few_tokens_at_once_does_so_up_to_its_bound():
    """On a CPU, router and norm included, until the other runner's sizes begin."""
    spec = make_spec()
    plan = replace(make_plan(spec), runner_by_batch_size=((4, "numba"), (ALL, "torch")))
    experts, draw = make_experts(spec), torch.Generator().manual_seed(2)
    router_EH = torch.randn(spec.num_experts, spec.hidden_size, generator=draw)
    layer = MoELayer(spec, plan, router_weight=router_EH, experts=experts)
    gain_H = torch.randn(spec.hidden_size, generator=draw)
    for tokens, at_once in ((1, True), (4, True), (5, False), (0, False)):
        x_TH = torch.randn(tokens, spec.hidden_size, generator=draw)
        found = layer.of_sum(x_TH, None, gain_H, 1e-6, None)
        assert (found is not None) is at_once
        normed_TH = torch.nn.functional.rms_norm(x_TH, (spec.hidden_size,), gain_H, 1e-6)
        ids_TK, weights_TK = route(normed_TH @ router_EH.T, spec.routing, spec.top_k)
        wanted_TH = experts_reference(normed_TH, ids_TK, weights_TK, experts, spec.activation)
        out_TH = layer(normed_TH) if found is None else found[1]
        torch.testing.assert_close(out_TH, wanted_TH, rtol=1e-4, atol=1e-4)


def test_updates_reach_both(monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, "MindsCompany")
    spec = make_spec()
    plan = replace(make_plan(spec), runner_by_batch_size=((1, "torch"), (ALL, "MindsCompany")))
    both = make_runner(spec, plan, torch.device("cpu"))
    both.prepare(make_experts(spec))
    other = make_experts(spec, seed=5)
    both.update(other)
    for tokens in (1, 3):
        x_TH, ids_TK = torch.ones(tokens, spec.hidden_size), torch.zeros(tokens, 1, dtype=torch.int32)
        weights_TK = torch.ones(tokens, 1)
        batch = TokensBatch(hidden=Hidden(data=x_TH), topk_ids=ids_TK, topk_weights=weights_TK)
        assert torch.allclose(
            both(batch), experts_reference(x_TH, ids_TK, weights_TK, other, spec.activation), atol=1e-4
        )
