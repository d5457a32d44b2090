"""Plans with DeepEP: which of its two kernels each phase takes, and all that it refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from turnout.config import Config
from turnout.engine.ranks.rendezvous import rendezvous
from turnout.errors import PlanRefused
from turnout.moe.budget import Budget
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.plan import MoEPlan, PlanRequest, plan
from turnout.moe.spec import MoESpec
from turnout.parallel import hardware
from turnout.parallel.topology import Topology

MODEL = MoESpec(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8)


def budget(prefill: int, dp_size: int) -> Budget:
    return Budget.from_limits(
        chunked_prefill_size=prefill, max_prefill_tokens=prefill, max_running_requests=64, dp_size=dp_size
    )


def planned(
    spec: MoESpec = MODEL, ranks_count: int = 4, prefill: int = 512, machine: str = "h200", **asked
) -> MoEPlan:
    return plan(
        spec,
        topology=Topology(
            tp_size=ranks_count, dp_size=ranks_count, ep_size=ranks_count, enable_dp_attention=True
        ),
        budget=budget(prefill, ranks_count),
        hardware=hardware.named(machine),
        request=PlanRequest(**{"moe_runner_backend": "torch", "moe_a2a_backend": "deepep"} | asked),
        compute_dtype="bfloat16",
    )


def used(chosen: MoEPlan) -> tuple[str, str]:
    return chosen.prefill.dispatcher, chosen.decode.dispatcher


def test_deepep_takes_normal_kernels_in_prefill_and_low_latency_in_decode():
    assert used(planned()) == ("deepep-normal", "deepep-low-latency")
    assert used(planned(deepep_mode="normal")) == ("deepep-normal",) * 2
    assert used(planned(deepep_mode="low_latency")) == ("deepep-low-latency",) * 2


def test_libraries_get_the_variables_they_read(monkeypatch):
    """Send queues of NVSHMEM hold the largest step twice, with one more place."""
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "")
    monkeypatch.setenv("NVSHMEM_REMOTE_TRANSPORT", "")
    most = DISPATCHERS["deepep-low-latency"].limits.max_tokens
    engine_plan = SimpleNamespace(
        plan=planned(), topology=Topology(), hardware=hardware.named("cpu"), config=Config()
    )
    rendezvous(engine_plan, init_method="")
    assert int(os.environ["NVSHMEM_QP_DEPTH"]) == 2 * (most + 1)
    assert os.environ["NVSHMEM_REMOTE_TRANSPORT"] == "none"


def test_low_latency_steps_have_at_most_1024_tokens():
    assert used(planned(prefill=1024, deepep_mode="low_latency"))
    with pytest.raises(PlanRefused, match=r"prefill steps of 1025 tokens.*at most 1024.* to 1024 or less"):
        planned(prefill=1025, deepep_mode="low_latency")
    assert used(planned(prefill=1025)) == ("deepep-normal", "deepep-low-latency")


def test_sizes_without_low_latency_kernels_decode_with_normal_ones():
    other = replace(MODEL, hidden_size=2880)
    found = planned(other)
    assert used(found) == ("deepep-normal",) * 2
    (why,) = [
        line for line in found.reasons if line.startswith("decode not by dispatcher deepep-low-latency: ")
    ]
    assert "hidden size 2880: has kernels for 2048" in why
    assert not any("not by" in line for line in planned().reasons)
    with pytest.raises(PlanRefused, match="hidden size 2880: has kernels for 2048, 2560"):
        planned(other, deepep_mode="low_latency")


def test_what_cannot_be_sent_is_refused_with_all_reasons():
    with pytest.raises(PlanRefused) as caught:
        planned(replace(MODEL, top_k=9), ranks_count=1, moe_a2a_backend="flashinfer")
    assert {r.asked for r in caught.value.refusals} >= {"--ep-size 1", "top-9 routing"}
    with pytest.raises(PlanRefused) as caught:
        planned(replace(MODEL, hidden_size=960), prefill=2000, deepep_mode="low_latency")
    asked = {r.asked for r in caught.value.refusals}
    assert asked >= {"hidden size 960", "prefill steps of 2000 tokens on a rank"}
    with pytest.raises(PlanRefused, match="use --dp-size 4 --ep-size 4 --enable-dp-attention"):
        plan(
            MODEL,
            topology=Topology(tp_size=4, dp_size=2, ep_size=4, enable_dp_attention=True),
            budget=budget(1, 2),
            hardware=hardware.named("h200"),
            request=PlanRequest(moe_a2a_backend="flashinfer"),
            compute_dtype="bfloat16",
        )


CALIBRATED = replace(MODEL, format="nvfp4", quantized_activations=True)


def test_low_latency_kernels_send_no_nvfp4_from_hopper():
    found = planned(CALIBRATED, moe_dispatch_dtype="nvfp4")
    assert used(found) == ("deepep-normal",) * 2
    assert found.prefill.wire_format == found.decode.wire_format == "nvfp4"
    with pytest.raises(PlanRefused, match=r"sends bf16, fp8, nvfp4 on compute capability 10\.0, 10\.3; the"):
        planned(CALIBRATED, moe_dispatch_dtype="nvfp4", deepep_mode="low_latency")


def test_low_latency_kernels_feed_masked_ones_nvfp4_on_blackwell():
    asked = {"moe_runner_backend": "flashinfer_cutedsl", "moe_activation_dtype": "nvfp4"}
    found = planned(CALIBRATED, machine="b200", **asked)
    assert used(found) == ("deepep-normal", "deepep-low-latency")
    assert found.decode.wire_format == found.prefill.wire_format == "nvfp4"
    assert found.decode.max_tokens % 128 == 0


def test_nvfp4_is_not_sent_by_a_library_that_cannot():
    """Here is none; a machine that is not this one is taken to have what it needs."""
    declared = DISPATCHERS["deepep-low-latency"]
    elsewhere = hardware.named("b200")
    assert "nvfp4" in declared.on(elsewhere).wire_formats
    here = declared.on(replace(elsewhere, present=True))
    assert here.wire_formats == {"bf16", "fp8"}
    assert here.withheld == ("nvfp4 with sgl-deep-ep>=0.1.2 (pip install --no-deps 'sgl-deep-ep>=0.1.2')",)
