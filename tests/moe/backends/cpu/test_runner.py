"""What the runner of compiled CPU kernels promises beyond the matrix: which memory it holds and keeps."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.moe.backends.torch.test_runner import make_batch, storage_of
from tests.moe.bounds import assert_close
from tests.moe.build import make_experts, make_plan, make_spec
from turnout.formats.spec import FORMATS
from turnout.moe.backends.cpu.runner import NumbaRunner
from turnout.moe.reference import experts_reference
from turnout.moe.spec import MoESpec, Routing

CPU = torch.device("cpu")
STORAGES = ["decoded", "packed"]


def make_runner(spec: MoESpec, experts=None, **fields) -> NumbaRunner:
    runner = NumbaRunner(spec, make_plan(spec, runner="numba", **fields), CPU)
    runner.prepare(make_experts(spec) if experts is None else experts)
    return runner


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("format", FORMATS)
def test_the_canonical_weights_are_let_go(format: str, storage: str):
    spec = make_spec("silu", format)
    experts = make_experts(spec)
    alive = [weakref.ref(t) for t in (*experts.w13.parts(), *experts.w2.parts())]
    runner = make_runner(spec, experts, weight_storage=storage)
    del experts
    assert not any(ref() is not None for ref in alive)
    assert runner(make_batch(spec, 2)).isfinite().all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("format", FORMATS)
def test_update_writes_into_the_same_storage(format: str, storage: str):
    spec = make_spec("swiglu", format)
    runner = make_runner(spec, weight_storage=storage)
    before = storage_of(runner)
    new = make_experts(spec, seed=7)
    runner.update(new)
    assert before
    assert storage_of(runner) == before
    batch = make_batch(spec, 5)
    ref = experts_reference(batch.hidden.data, batch.topk_ids, batch.topk_weights, new, spec.activation)
    assert_close(runner(batch), ref, activation_format="bf16", compute_dtype="float32")


@pytest.mark.parametrize(
    ("routing", "fields", "taken"),
    [
        (Routing(kind="softmax_topk"), {}, True),
        (Routing(kind="topk_softmax"), {}, True),
        (Routing(kind="sigmoid_topk"), {}, False),
        (Routing(kind="softmax_topk", on_input=True), {}, False),
        (Routing(kind="softmax_topk"), {"compute_dtype": "bfloat16"}, False),
    ],
)
def test_which_routers_a_call_of_the_experts_takes_in(routing: Routing, fields: dict, taken: bool):
    spec = make_spec("silu")
    router_EH = torch.randn(spec.num_experts, spec.hidden_size)
    counts_E = torch.zeros(spec.num_experts, dtype=torch.int64)
    found = make_runner(spec, **fields).with_router(router_EH, routing, spec.top_k, counts_E)
    assert (found is not None) is taken
