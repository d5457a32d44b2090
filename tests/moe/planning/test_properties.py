"""Whatever is asked, the planner answers with a plan that holds together, or with reasons and remedies."""

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.moe import made_up
from tests.moe.made_up import ALL_FORMATS, BLACKWELL, CPU, HOPPER, dispatcher, runner
from turnout.errors import PlanRefused
from turnout.formats.spec import FORMATS
from turnout.moe.budget import Budget
from turnout.moe.capabilities.limits import Limits
from turnout.moe.plan import PHASES, PlanRequest, plan
from turnout.moe.spec import Activation, MoESpec
from turnout.parallel.hardware import GB
from turnout.parallel.topology import Topology


def some(values):
    """Mostly all of `values`, so that plans are common; else some."""
    every = st.just(frozenset(values))
    return every | every | every | every | st.sets(st.sampled_from(sorted(values)), min_size=1).map(frozenset)


def seldom(usual, *unusual):
    return st.sampled_from([usual] * (9 * len(unusual)) + list(unusual))


DEVICES = some({"cpu", "cuda"})
WIRES = some({"bf16", "fp8", "nvfp4"})
RUNNERS = st.builds(
    runner,
    st.sampled_from(["oak", "elm", "fir"]),
    layouts=some({"tokens", "batched_experts"}),
    weight_formats=some(ALL_FORMATS),
    wire_formats=WIRES,
    activation_formats=some({"bf16", "nvfp4"}),
    activations=some({"silu", "swiglu", "relu2"}),
    expert_bias=seldom(True, False),
    devices=DEVICES,
    architectures=seldom(None, frozenset({90}), frozenset({100})),
    hidden_multiple=seldom(1, 64, 128),
    intermediate_multiple=seldom(1, 16, 64, 96),
    weight_storages=some({"packed", "decoded"}),
    fp4_units=st.booleans(),
    preference=st.integers(-2, 2),
)
DISPATCHERS = st.builds(
    dispatcher,
    st.sampled_from(["ash", "yew", "box"]),
    layout=st.sampled_from(["tokens", "batched_experts"]),
    exchange=st.sampled_from(["gather", "all_to_all"]),
    wire_formats=WIRES,
    devices=DEVICES,
    multi_host=seldom(True, False),
    limits=seldom(Limits(), Limits(ep_sizes=frozenset({1, 2, 4})), Limits(one_to_one=True, max_tokens=1024)),
    preference=st.integers(-2, 2),
)
SPECS = st.builds(
    MoESpec,
    hidden_size=seldom(2048, 64, 960, 2880),
    intermediate_size=seldom(768, 32, 48, 512, 704),
    num_experts=seldom(64, 8, 60, 96),
    top_k=st.sampled_from([1, 4, 8]),
    activation=st.sampled_from(
        [Activation(), Activation(kind="relu2"), Activation(kind="swiglu", limit=7.0)]
    ),
    expert_bias=st.booleans(),
    format=st.sampled_from(sorted(ALL_FORMATS)),
).flatmap(
    lambda spec: st.sampled_from(
        [spec, replace(spec, quantized_activations=True)] if spec.format == "nvfp4" else [spec]
    )
)


@st.composite
def topologies(draw):
    """Mostly sizes that divide."""
    tp_size = draw(st.sampled_from([1, 1, 2, 3, 4, 6, 8, 32]))
    divisors = [d for d in range(1, tp_size + 1) if tp_size % d == 0]
    dp_size = draw(seldom(1, *divisors))
    return Topology(
        tp_size=tp_size,
        dp_size=dp_size,
        ep_size=draw(st.sampled_from([*divisors, tp_size, tp_size, 5])),
        enable_dp_attention=dp_size > 1,
        nnodes=draw(seldom(1, 2)),
    )


BUDGETS = st.builds(
    Budget.from_limits,
    chunked_prefill_size=st.sampled_from([16, 8192]),
    max_prefill_tokens=seldom(8192, 16, 2**20),
    max_running_requests=st.integers(1, 512),
    max_dispatch_tokens_per_rank=seldom(0, 64, 2**20),
)
HARDWARE = st.sampled_from([CPU, CPU, HOPPER, BLACKWELL, replace(CPU, memory_bytes=GB // 10)])
REQUESTS = st.builds(
    PlanRequest,
    moe_runner_backend=seldom("auto", "oak", "triton", "none such"),
    moe_a2a_backend=seldom("auto", "ash", "deepep"),
    moe_dispatch_dtype=seldom("auto", "bf16", "fp8", "nvfp4"),
    moe_activation_dtype=seldom("auto", "bf16", "nvfp4"),
    moe_weight_storage=seldom("auto", "packed", "decoded"),
)
QUESTIONS = st.fixed_dictionaries(
    {
        "topology": topologies(),
        "budget": BUDGETS,
        "hardware": HARDWARE,
        "request": REQUESTS,
        "compute_dtype": st.sampled_from(["float32", "bfloat16"]),
        "num_layers": st.sampled_from([1, 48]),
        "runners": st.lists(RUNNERS, min_size=1, max_size=3, unique_by=lambda r: r.name),
        "dispatchers": st.lists(DISPATCHERS, min_size=1, max_size=3, unique_by=lambda d: d.name),
    }
)


def answer(spec, question):
    budget = made_up.budget(question["topology"], of=question["budget"])
    try:
        return plan(spec, **(question | {"budget": budget})), None
    except PlanRefused as error:
        return None, error


@settings(max_examples=300, deadline=None)
@given(SPECS, QUESTIONS)
def test_a_consistent_plan_or_reasons_with_remedies(spec, question):
    made, error = answer(spec, question)
    if made is None:
        assert error.refusals
        assert len(set(error.refusals)) == len(error.refusals)
        assert all(r.who and r.asked and r.limit and r.remedy for r in error.refusals)
    else:
        check_holds_together(made, spec, question)


def check_holds_together(made, spec, question):
    """The plan against the declarations of the backends it names, condition by condition."""
    topology, budget, hardware = question["topology"], question["budget"], question["hardware"]
    chosen = {backend.name: backend for backend in (*question["runners"], *question["dispatchers"])}
    oak = chosen[made.prefill.runner]
    assert made.decode.runner == oak.name
    assert spec.format in oak.weight_formats
    assert spec.activation.kind in oak.activations
    assert oak.expert_bias or not spec.expert_bias
    assert made.activation_format in oak.activation_formats
    assert made.activation_format == "bf16" or spec.quantized_activations
    assert made.weight_storage in oak.weight_storages
    assert hardware.device == "cpu" or oak.architectures is None or hardware.architecture in oak.architectures
    shard = spec.intermediate_size // topology.expert_tp
    assert shard * topology.expert_tp == spec.intermediate_size
    assert shard % oak.intermediate_multiple == 0
    assert topology.expert_tp == 1 or shard % FORMATS[spec.format].group == 0
    assert made.num_local_experts * topology.ep_size == spec.num_experts
    for name in PHASES:
        phase, ash = made.phase(name), chosen[made.phase(name).dispatcher]
        assert phase.phase == name
        assert phase.layout == ash.layout
        assert phase.layout in oak.layouts
        assert phase.wire_format in oak.wire_formats & ash.wire_formats
        assert {hardware.device} <= oak.devices & ash.devices
        stays = ash.exchange == "gather" and topology.dp_size == 1
        assert (phase.reduce == "layer") == (stays and topology.tp_size > 1)
        assert phase.wire_format == "bf16" or (not stays and phase.wire_format in ("fp8", "nvfp4"))
        assert phase.wire_format != "nvfp4" or spec.quantized_activations
        assert phase.max_tokens >= budget.phase_tokens(name) * topology.dp_size
    assert made.shared_expert == (
        "sharded" if made.prefill.reduce == made.decode.reduce == "layer" else "whole"
    )
    experts = made.weight_bytes * question["num_layers"]
    assert experts + made.workspace_bytes + made.dispatch_bytes <= hardware.memory_bytes
    request = question["request"]
    for asked, got in (
        (request.moe_runner_backend, oak.name),
        (request.moe_a2a_backend, made.decode.dispatcher),
        (request.moe_dispatch_dtype, made.decode.wire_format),
        (request.moe_activation_dtype, made.activation_format),
        (request.moe_weight_storage, made.weight_storage),
    ):
        assert asked in ("auto", got)
    assert made.reasons


@settings(max_examples=80, deadline=None)
@given(SPECS, QUESTIONS)
def test_a_capacity_that_a_refusal_names_is_enough(spec, question):
    question |= {"budget": replace(question["budget"], capacity=question["budget"].local - 1)}
    _, error = answer(spec, question)
    (refusal,) = [r for r in error.refusals if r.who == "budget"]
    capacity = int(re.findall(r"--max-dispatch-tokens-per-rank (\d+)", refusal.remedy)[0])
    _, error = answer(spec, question | {"budget": replace(question["budget"], capacity=capacity)})
    assert error is None or not any(r.who == "budget" for r in error.refusals)


@settings(max_examples=80, deadline=None)
@given(SPECS, QUESTIONS)
def test_sizes_that_a_layer_refusal_names_divide(spec, question):
    """Whatever else is wrong, the layer's own refusals are answered by any of the sizes they suggest."""
    _, error = answer(spec, question)
    for refusal in error.refusals if error else ():
        if refusal.who != "layer" or "--ep-size" not in refusal.remedy:
            continue
        tp = re.findall(r"--tp-size (\d+)", refusal.remedy) or [question["topology"].tp_size]
        for ep in re.findall(r"\d+", refusal.remedy.partition("--ep-size")[2]):
            topology = replace(question["topology"], tp_size=int(tp[0]), ep_size=int(ep))
            _, after = answer(spec, question | {"topology": topology})
            assert after is None or not any(r.asked == refusal.asked for r in after.refusals)


@settings(max_examples=60, deadline=None)
@given(SPECS, QUESTIONS)
def test_what_auto_may_choose_does_not_depend_on_the_order_of_registration(spec, question):
    """Only ties of preference are broken by order: with distinct preferences the plan is the same."""
    names = [f"{i}" for i in range(3)]
    question["runners"] = [
        replace(r, preference=i, name=n)
        for i, (n, r) in enumerate(zip(names, question["runners"], strict=False))
    ]
    question["dispatchers"] = [
        replace(d, preference=i, name=n)
        for i, (n, d) in enumerate(zip(names, question["dispatchers"], strict=False))
    ]
    question["request"] = replace(question["request"], moe_runner_backend="auto", moe_a2a_backend="auto")
    made, error = answer(spec, question)
    turned = question | {k: question[k][::-1] for k in ("runners", "dispatchers")}
    again, error_again = answer(spec, turned)
    if made is None:
        assert set(error.refusals) == set(error_again.refusals)
    else:
        assert (made.prefill, made.decode) == (again.prefill, again.decode)
        assert set(made.refused) == set(again.refused)
