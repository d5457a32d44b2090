"""The checks of a layer: what works passes in every format, and each kind of fault is found and named."""

from __future__ import annotations

import pytest
import torch

from tests.moe.broken import WRONG, offer
from tests.moe.build import MAX_TOKENS, expert_slice, make_experts, make_plan, make_spec
from turnout.formats import fp8
from turnout.formats.spec import FORMATS
from turnout.moe.backends.hopper.runner import HopperRunner
from turnout.moe.backends.torch.runner import TorchRunner
from turnout.moe.batch import ExpertsBatch, Hidden, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.moe.verify import Inputs, Oracle, Result, caught, make_batches, verify

CPU = torch.device("cpu")
MOST = 40


def inputs(spec: MoESpec, tokens: int = 23, dtype: torch.dtype = torch.float32) -> Inputs:
    draw = torch.Generator().manual_seed(7)
    weights_TK, ids_TK = torch.rand(tokens, spec.num_experts, generator=draw).topk(spec.top_k)
    x_TH = torch.randn(tokens, spec.hidden_size, generator=draw)
    return Inputs(x_TH=x_TH.to(dtype), ids_TK=ids_TK.int(), weights_TK=weights_TK)


def results(spec: MoESpec, plan: MoEPlan, experts=None) -> dict[str, Result]:
    """By batch."""
    experts = experts or make_experts(spec)
    batches = make_batches(inputs(spec, dtype=getattr(torch, plan.compute_dtype)), plan, MOST)
    found = verify(spec, plan, experts, batches, Oracle(spec, experts, batches, CPU), CPU)
    return {result.batch: result for result in found}


@pytest.mark.parametrize("storage", ["packed", "decoded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS)
def test_what_works_passes(format: str, dtype: str, storage: str):
    spec = make_spec("swiglu", format, intermediate_size=128)
    for activations in {"nvfp4": ("bf16", "nvfp4"), "fp8": ("bf16", "fp8")}.get(format, ("bf16",)):
        plan = make_plan(spec, compute_dtype=dtype, weight_storage=storage, activation_format=activations)
        found = results(spec, plan)
        assert list(found) == ["0", "1", "3", "17", "40", "one expert", "each expert", "padding"]
        for result in found.values():
            assert result.passed, result
            assert result.error is not None
            assert result.error <= result.bound
            assert result.repeats
        assert found["padding"].error == 0
        assert [found[name].tokens for name in ("0", "40", "one expert", "each expert")] == [0, 40, 40, 8]
        # The gathered way through, which decoded weights allow, serves up to 4 pairs per expert.
        assert found["1"].independent is (True if storage == "decoded" else None)
        assert found["17"].independent is None


def test_a_slice_of_the_experts_is_verified_by_itself():
    spec = make_spec()
    found = results(spec, make_plan(spec, first=4, count=4), expert_slice(make_experts(spec), 4, 4))
    assert all(result.passed for result in found.values())
    assert found["each expert"].tokens == 4


def test_more_experts_than_tokens_fit_come_in_several_batches():
    spec = make_spec(num_experts=100)
    names = [batch.name for batch in make_batches(inputs(spec), make_plan(spec), MOST)]
    assert [name for name in names if name.startswith("experts")] == [
        "experts 0..39",
        "experts 40..79",
        "experts 80..99",
    ]


@pytest.mark.parametrize(
    ("name", "failing", "said"),
    [
        ("WrongExpert", "each expert", f"wrong for expert {WRONG}: error"),
        ("PaddingLeaks", "padding", "relative error nan"),
        ("NeedsTokens", "0", "ZeroDivisionError: no tokens"),
        ("Drifts", "17", "a repeated call gives other bits"),
        ("MindsCompany", "1", "bits depend on its batch"),
        ("WrongType", "3", "gives torch.float64"),
        ("CannotPrepare", "any", "cannot be built: RuntimeError: no kernel for this shape"),
    ],
)
def test_a_fault_is_found_and_named(name: str, failing: str, said: str, monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, name)
    spec = make_spec()
    found = results(spec, make_plan(spec, runner=name))
    assert not found[failing].passed
    assert said in found[failing].problem


def test_faults_show_only_where_they_are(monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, "PaddingLeaks", "NeedsTokens")
    spec = make_spec()
    for name, failing in (("PaddingLeaks", "padding"), ("NeedsTokens", "0")):
        found = results(spec, make_plan(spec, runner=name))
        assert [batch for batch, result in found.items() if not result.passed] == [failing]


def test_one_wrong_expert_among_many_hides_in_no_mean(monkeypatch: pytest.MonkeyPatch):
    """bfloat16's bound is wide, and one of 64 experts weighs little in a batch."""
    offer(monkeypatch, "WrongExpert")
    spec = make_spec(num_experts=64)
    found = results(spec, make_plan(spec, runner="WrongExpert", compute_dtype="bfloat16"))
    assert f"wrong for expert {WRONG}: error" in found["experts 0..39"].problem
    assert found["experts 40..63"].passed


def test_weights_that_are_no_numbers_are_not_blamed_on_a_runner():
    spec = make_spec()
    experts = make_experts(spec)
    experts.w2.data[5, 0, 0] = torch.nan
    found = results(spec, make_plan(spec), experts)
    assert found["each expert"].problem == (
        "no runner can be right: weights of expert 5 or inputs hold NaN or infinities"
    )
    assert found["each expert"].repeats
    assert found["padding"].passed
    assert not found["40"].passed


def test_runners_that_promise_nothing_are_not_held_to_it(monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, "Drifts", deterministic=False)
    monkeypatch.setattr(TorchRunner, "same_bits", lambda self, tokens: range(0))
    spec = make_spec()
    found = results(spec, make_plan(spec, runner="Drifts"))
    assert all(r.passed and r.repeats is None and r.independent is None for r in found.values())


def test_what_a_runner_was_given_is_read_from_both_layouts():
    spec = make_spec()
    given = inputs(spec)
    tokens = TokensBatch(hidden=Hidden(data=given.x_TH), topk_ids=given.ids_TK, topk_weights=given.weights_TK)
    seen = caught(tokens, 0, spec.top_k)
    assert torch.equal(seen.x_TH, given.x_TH)
    assert torch.equal(seen.ids_TK, given.ids_TK)

    x_EC = torch.full((2, 3, spec.hidden_size), torch.nan)
    x_EC[0, 0], x_EC[1, 0], x_EC[1, 1] = given.x_TH[:3]
    codes, scale = fp8.encode_activation(x_EC)
    counts = torch.tensor([1, 2], dtype=torch.int32)
    batch = ExpertsBatch(hidden=Hidden(data=codes, format="fp8", scale=scale), counts=counts)
    seen = caught(batch, 4, spec.top_k)
    assert torch.allclose(seen.x_TH, given.x_TH[:3], rtol=0.07, atol=1e-2)
    assert seen.ids_TK.tolist() == [[4, -1], [5, -1], [5, -1]]
    assert seen.weights_TK.tolist() == [[1, 0], [1, 0], [1, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["bf16", "nvfp4", "mxfp4"])
def test_a_gpu_runner_keeps_its_promises(format: str):
    spec, device = make_spec(format=format), torch.device("cuda")
    plan, experts = make_plan(spec, runner="hopper", compute_dtype="bfloat16"), make_experts(spec)
    given = inputs(spec).to(device, torch.bfloat16)
    batches = make_batches(given, plan, MOST)
    found = verify(spec, plan, experts, batches, Oracle(spec, experts, batches, device), device)
    assert all(result.passed for result in found), found
    assert {result.batch for result in found if result.replays} == {"1", "17"}
    assert any(result.independent for result in found)


@pytest.mark.gpu
def test_promised_sizes_agree_with_the_table_of_tiles():
    spec = make_spec(num_experts=8, top_k=2)
    runner = HopperRunner(spec, make_plan(spec, compute_dtype="bfloat16"), torch.device("cuda"))
    runner.prepare(make_experts(spec))
    promised = [runner.same_bits(tokens) for tokens in range(MAX_TOKENS + 1)]
    assert all(tokens in sizes for tokens, sizes in enumerate(promised))
    assert len({sizes.start for sizes in promised}) > 1
    for tokens, sizes in enumerate(promised):
        assert {runner._tiles(size) for size in sizes} == {runner._tiles(tokens)}
        assert sizes.stop > MAX_TOKENS or runner._tiles(sizes.stop) != runner._tiles(tokens)


def test_inputs_are_repeated_where_more_are_wanted():
    spec = make_spec()
    given = inputs(spec, tokens=2)
    batches = {batch.name: batch.inputs for batch in make_batches(given, make_plan(spec), 5)}
    assert torch.equal(batches["5"].x_TH, given.x_TH[[0, 1, 0, 1, 0]])
