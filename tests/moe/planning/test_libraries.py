"""The planner over the backends of this version, for GPUs that need not be here: which combinations run, and
everything that stands against the others. Those with backends that exist only in tests are next to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.moe.made_up import BLACKWELL, HOPPER
from turnout.errors import PlanRefused
from turnout.moe.budget import Budget
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.plan import MoEPlan, PlanRequest, plan
from turnout.moe.spec import Activation, MoESpec
from turnout.parallel.hardware import Hardware
from turnout.parallel.topology import Topology

DEEPSEEK = MoESpec(
    hidden_size=7168,
    intermediate_size=2048,
    num_experts=256,
    top_k=8,
    format="nvfp4",
    quantized_activations=True,
)
GPT_OSS = MoESpec(
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=32,
    top_k=4,
    activation=Activation(kind="swiglu", alpha=1.702, beta=1.0, limit=7.0),
    expert_bias=True,
    format="mxfp4",
)
FOUR = Topology(tp_size=4, dp_size=4, ep_size=4, enable_dp_attention=True)


def made(
    spec: MoESpec = DEEPSEEK,
    *,
    topology: Topology = FOUR,
    hardware: Hardware = BLACKWELL,
    limits: dict[str, int] | None = None,
    **request: str,
) -> MoEPlan:
    given = {"chunked_prefill_size": 512, "max_prefill_tokens": 2048, "max_running_requests": 64}
    budget = Budget.from_limits(**(given | (limits or {})), dp_size=topology.dp_size)
    return plan(
        spec,
        topology=topology,
        budget=budget,
        hardware=hardware,
        request=PlanRequest(**request),
        compute_dtype="bfloat16",
        num_layers=2,
    )


def refused(*args, **kwargs) -> dict[tuple[str, str], str]:
    """What each backend was asked -> the change that removes the refusal; every refusal has one."""
    with pytest.raises(PlanRefused) as caught:
        made(*args, **kwargs)
    found = {(r.who, r.asked): r.remedy for r in caught.value.refusals}
    assert all(found.values())
    assert all(
        f"{r.who}" in str(caught.value) and r.limit in str(caught.value) for r in caught.value.refusals
    )
    return found


# What the flags of the three published parallel layouts come to: dispatcher, layout and wire by phase.
ACCEPTED = {
    "none": [("none", "tokens", "nvfp4"), ("none", "tokens", "nvfp4")],
    "flashinfer": [("flashinfer", "tokens", "nvfp4"), ("flashinfer", "tokens", "nvfp4")],
    "deepep": [("deepep-normal", "tokens", "nvfp4"), ("deepep-low-latency", "batched_experts", "nvfp4")],
}


@pytest.mark.parametrize("dispatcher", ACCEPTED)
def test_cutedsl_behind_each_dispatcher(dispatcher: str):
    accepted = made(moe_runner_backend="flashinfer_cutedsl", moe_a2a_backend=dispatcher)
    phases = [(p.dispatcher, p.layout, p.wire_format) for p in (accepted.prefill, accepted.decode)]
    assert phases == ACCEPTED[dispatcher]
    assert {accepted.prefill.runner, accepted.decode.runner} == {"flashinfer_cutedsl"}
    assert accepted.activation_format == "nvfp4"
    assert {accepted.prefill.reduce, accepted.decode.reduce} == {"none"}  # the dispatcher has summed
    assert accepted.shared_expert == "whole"  # on a rank's own tokens


def test_cutedsl_with_experts_in_parts_leaves_the_sum_to_the_layer():
    """EP 1 and EP = TP of one group: nothing moves, and a shared expert is a part of the sum."""
    for ep in (1, 4):
        accepted = made(
            topology=Topology(tp_size=4, ep_size=ep),
            moe_runner_backend="flashinfer_cutedsl",
            moe_a2a_backend="none",
        )
        assert (accepted.prefill.reduce, accepted.decode.reduce) == ("layer", "layer")
        assert accepted.shared_expert == "sharded"
        assert accepted.dispatch_bytes == 0


@pytest.mark.parametrize("dispatcher", ["flashinfer", "deepep"])
def test_ranks_that_are_not_one_to_one_are_told_how(dispatcher: str):
    two = replace(FOUR, dp_size=2, ep_size=2)
    found = refused(topology=two, moe_runner_backend="flashinfer_cutedsl", moe_a2a_backend=dispatcher)
    asked = "--dp-size 2 and --ep-size 2 with --tp-size 4"
    remedies = {remedy for (_, what), remedy in found.items() if what == asked}
    assert remedies == {
        "use --dp-size 4 --ep-size 4 --enable-dp-attention, or choose another --moe-a2a-backend"
    }


def test_fp8_on_the_wire_never_reaches_kernels_for_nvfp4():
    for dispatcher in ("flashinfer", "deepep"):
        found = refused(
            moe_runner_backend="flashinfer_cutedsl", moe_a2a_backend=dispatcher, moe_dispatch_dtype="fp8"
        )
        pairs = [remedy for (who, _), remedy in found.items() if "flashinfer_cutedsl with" in who]
        assert pairs
        assert all("--moe-dispatch-dtype auto" in remedy for remedy in pairs)


def test_low_latency_is_for_the_masked_route_alone():
    masked = {"moe_a2a_backend": "deepep", "deepep_mode": "low_latency"}
    small = {"chunked_prefill_size": 256, "max_prefill_tokens": 256}
    accepted = made(moe_runner_backend="flashinfer_cutedsl", limits=small, **masked)
    assert {accepted.prefill.layout, accepted.decode.layout} == {"batched_experts"}
    for name in ("flashinfer_trtllm", "flashinfer_cutlass"):
        found = refused(moe_runner_backend=name, limits=small, **masked)
        assert (
            f"runner {name} with dispatcher deepep-low-latency",
            "layout 'batched_experts', which the dispatcher emits",
        ) in found
    found = refused(moe_runner_backend="flashinfer_cutedsl", **masked)  # prefill steps of 2048 tokens
    assert ("dispatcher deepep-low-latency", "prefill steps of 2048 tokens on a rank") in found


def test_capacity_is_held_against_the_largest_step_with_drafts():
    limits = {"max_running_requests": 512, "draft_tokens": 8, "max_dispatch_tokens_per_rank": 2048}
    found = refused(moe_runner_backend="flashinfer_cutedsl", moe_a2a_backend="flashinfer", limits=limits)
    assert (
        "use --max-dispatch-tokens-per-rank 4096 or more"
        in found["budget", "--max-dispatch-tokens-per-rank 2048"]
    )
    assert made(moe_a2a_backend="flashinfer", limits=limits | {"max_dispatch_tokens_per_rank": 4096})


def test_all_that_is_wrong_is_said_at_once():
    found = refused(
        replace(GPT_OSS, expert_bias=True),
        hardware=HOPPER,
        topology=replace(FOUR, dp_size=2),
        moe_runner_backend="flashinfer_cutedsl",
        moe_a2a_backend="flashinfer",
        moe_dispatch_dtype="nvfp4",
        limits={"max_dispatch_tokens_per_rank": 8},
    )
    who = "runner flashinfer_cutedsl"
    assert {
        ("budget", "--max-dispatch-tokens-per-rank 8"),
        ("dispatcher flashinfer", "--dp-size 2 and --ep-size 4 with --tp-size 4"),
        ("wire", "--moe-dispatch-dtype nvfp4"),
        (who, "h200 (compute capability 9.0)"),
        (who, "mxfp4 expert weights"),
        (who, "experts with biases"),
        (who, "hidden size 2880"),
    } <= set(found)


@pytest.mark.parametrize("topology", [Topology(), Topology(tp_size=2), Topology(tp_size=4, ep_size=4), FOUR])
def test_mxfp4_on_hopper_takes_gpt_oss_in_any_arrangement(topology: Topology):
    accepted = made(GPT_OSS, topology=topology, hardware=HOPPER, moe_runner_backend="flashinfer_mxfp4")
    assert accepted.weight_storage == "packed"
    assert accepted.activation_format == "bf16"
    assert accepted.workspace_bytes > 0


def test_what_cutlass_runs_depends_on_format_and_architecture():
    qwen = MoESpec(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8)
    calibrated = replace(qwen, format="nvfp4", quantized_activations=True)
    one, name = Topology(), "flashinfer_cutlass"
    for spec, hardware in (
        (qwen, HOPPER),
        (qwen, BLACKWELL),
        (replace(qwen, format="fp8"), HOPPER),
        (calibrated, BLACKWELL),
    ):
        assert made(spec, topology=one, hardware=hardware, moe_runner_backend=name).prefill.runner == name
    found = refused(replace(qwen, format="fp8"), topology=one, moe_runner_backend=name)
    assert (f"runner {name}", "fp8 expert weights on b200 (compute capability 10.0)") in found
    found = refused(calibrated, topology=one, hardware=HOPPER, moe_runner_backend=name)
    assert (f"runner {name}", "nvfp4 expert weights on h200 (compute capability 9.0)") in found
    weight_only = replace(calibrated, quantized_activations=False)
    assert (f"runner {name}", "--moe-activation-dtype bf16") in refused(
        weight_only, topology=one, moe_runner_backend=name
    )


@pytest.mark.parametrize(
    ("spec", "hardware", "chosen"),
    [
        (DEEPSEEK, BLACKWELL, "flashinfer_cutedsl"),
        (GPT_OSS, HOPPER, "hopper"),
        (MoESpec(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8), HOPPER, "hopper"),
        (
            MoESpec(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8),
            BLACKWELL,
            "flashinfer_cutlass",
        ),
    ],
)
def test_auto_says_on_what_its_choice_rests(spec: MoESpec, hardware: Hardware, chosen: str):
    accepted = made(spec, topology=Topology(), hardware=hardware)
    assert accepted.prefill.runner == chosen
    reason = accepted.reasons[0]
    assert reason.startswith(f"runner {chosen}: preference ")
    assert RUNNERS[chosen].grounds in reason
    assert RUNNERS[chosen].grounds
