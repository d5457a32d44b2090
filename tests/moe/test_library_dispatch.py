"""Dispatchers that call a library, on CPU ranks: the layer's matrix over the library's documented semantics.

FlashInfer's own Python runs, over kernels in plain torch (flashinfer_on_cpu.py); DeepEP is a class with the
documented signatures (deepep_on_cpu.py). Both check every argument they are given. test_library_gpu.py runs
the libraries themselves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from tests.moe.backends.deepep import deepep_on_cpu
from tests.moe.backends.flashinfer import flashinfer_on_cpu
from tests.moe.build import make_experts, make_plan, make_setup, make_spec
from tests.moe.exchange import Case, Finding, held, inputs, run
from tests.ranks import Pools, Rank
from turnout.config import Config
from turnout.engine.ranks.rendezvous import rendezvous
from turnout.errors import PlanRefused
from turnout.moe.backends.deepep.buffers import low_latency_size_hint, nvl_size_hint
from turnout.moe.backends.flashinfer.buffers import WorkspaceSizes, buffer_bytes
from turnout.moe.budget import Budget
from turnout.moe.capabilities.capability import DispatcherCapability
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.capabilities.limits import Limits
from turnout.moe.capabilities.rank_share import DispatchShare
from turnout.moe.plan import MoEPlan, PlanRequest, Wishes, plan
from turnout.moe.reference import experts_reference
from turnout.moe.spec import MoESpec, RankShape
from turnout.parallel import hardware
from turnout.parallel.topology import Topology

SUBSTITUTES = {
    "flashinfer": flashinfer_on_cpu,
    "deepep-normal": deepep_on_cpu,
    "deepep-low-latency": deepep_on_cpu,
}
CARRIES = {name: DISPATCHERS[name].wire_formats for name in SUBSTITUTES}
MODEL = MoESpec(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8)


@dataclass(frozen=True, kw_only=True)
class LibraryCase(Case):
    """Between CPUs, with the limits that come from a GPU left out."""

    @property
    def compute_dtype(self) -> str:
        return "float32" if self.dispatcher == "flashinfer" else "bfloat16"

    def declared(self) -> Sequence[DispatcherCapability]:
        own = DISPATCHERS[self.dispatcher]
        anywhere = {"devices": frozenset({"cpu"}), "limits": Limits(one_to_one=True)}
        return [replace(own, **anywhere, wire_needs=(), requires=())]


def cases(dispatcher: str, ranks: int) -> list[LibraryCase]:
    plain = LibraryCase(dispatcher=dispatcher, world=ranks, ep=ranks, dp=ranks, shared_memory=False)
    quantised = [
        replace(plain, weights="mxfp4", wire="fp8"),
        replace(plain, weights="nvfp4", wire="nvfp4"),
        replace(plain, weights="nvfp4", activation_format="nvfp4", wire="nvfp4"),
    ]
    return [plain, replace(plain, skewed=True), *(c for c in quantised if c.wire in CARRIES[dispatcher])]


def run_with_substitute(rank: Rank, dispatcher: str, some: Sequence[Case]) -> list[Finding]:
    with SUBSTITUTES[dispatcher].installed():
        return run(rank, some, thorough=False)


@pytest.mark.parametrize(
    ("dispatcher", "ranks_count"), [*((name, 2) for name in SUBSTITUTES), ("flashinfer", 4)]
)
def test_the_layer_against_the_reference(ranks: Pools, dispatcher, ranks_count):
    some = cases(dispatcher, ranks_count)
    some = some if ranks_count == 2 else some[-1:]
    found = [f for own in ranks(ranks_count).run(run_with_substitute, dispatcher, some) for f in own]
    bad = [finding for finding in found if not finding.good]
    assert not bad, "\n".join(map(str, bad[:5]))
    assert {finding.case for finding in found} == set(some)


def padded(rank: Rank, dispatcher: str) -> None:
    with SUBSTITUTES[dispatcher].installed():
        check_padding(rank, dispatcher)


def check_padding(rank: Rank, dispatcher: str) -> None:
    """Padding among tokens, alone on a rank, and in some places of a token only: nothing comes of it."""
    groups = rank.groups(dp_size=rank.size, ep_size=rank.size, shared_memory=False)
    spec, span = make_spec("swiglu"), groups.topology.expert_range(8)
    declared = DISPATCHERS[dispatcher]
    chosen = make_plan(
        spec, dispatcher=dispatcher, layout=declared.layout, first=span.start, count=len(span),
        compute_dtype="bfloat16",
    )  # fmt: skip
    cpu, experts = torch.device("cpu"), make_experts(spec)
    runner = RUNNERS.load("torch")(spec, chosen, cpu)
    runner.prepare(held(experts, groups.topology))
    sends = DISPATCHERS.load(dispatcher)(make_setup(spec, chosen, groups=groups))
    tokens = [5, 3, 0, 2][: rank.size]
    x_TH = inputs(tokens[rank.number], rank.number).bfloat16()
    ids_TK = torch.stack((torch.arange(len(x_TH)), torch.arange(len(x_TH)) + 3), dim=1).int() % 8
    weights_TK = torch.rand(len(x_TH), 2)
    ids_TK[1:, 0], weights_TK[1:, 0] = -1, 0  # the second choice alone
    gone = torch.arange(len(x_TH)) % 3 == (2 if rank.number else 0)
    x_TH[gone], ids_TK[gone], weights_TK[gone] = torch.nan, -1, 0
    batch, state = sends.dispatch(x_TH, ids_TK, weights_TK, tokens)
    if declared.layout == "tokens":
        real = sum(count - len(range(2 if rank else 0, count, 3)) for rank, count in enumerate(tokens))
        assert int((batch.topk_ids >= 0).any(1).sum()) <= real, "rows that nobody sent go to experts"
    y_TH = sends.combine(runner(batch), state)
    ref_TH = experts_reference(x_TH.float().nan_to_num(), ids_TK, weights_TK, experts, spec.activation)
    torch.testing.assert_close(y_TH.float(), ref_TH, rtol=0.05, atol=0.1)
    assert not y_TH[gone].any()
    batch, state = sends.dispatch(x_TH[:0], ids_TK[:0], weights_TK[:0], [0] * rank.size)
    assert sends.combine(runner(batch), state).shape == (0, x_TH.shape[1])


@pytest.mark.parametrize("dispatcher", SUBSTITUTES)
def test_padding_comes_out_as_zero(ranks: Pools, dispatcher):
    ranks(4).run(padded, dispatcher)


# --- sizes ---------------------------------------------------------------------------------------------


# What `moe_a2a_get_aux_data_size` of FlashInfer 0.7.2, compiled, answers for (ranks, tokens).
BOOKKEEPING = {(2, 1): 640, (4, 64): 11648, (8, 1000): 176512, (33, 17): 3968, (64, 8192): 1442944}


@pytest.mark.parametrize(("ranks_count", "tokens"), BOOKKEEPING)
def test_a_one_sided_workspace_is_as_large_as_the_library_asks(ranks_count, tokens):
    sizes = WorkspaceSizes(ranks=ranks_count, capacity=tokens, sent=2 * 4096 + 64, returned=2 * 4096)
    assert sizes.bookkeeping == BOOKKEEPING[ranks_count, tokens]
    with flashinfer_on_cpu.installed():
        from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_get_workspace_size_per_rank

        wanted = moe_a2a_get_workspace_size_per_rank(ranks_count, tokens, sizes.sent, sizes.returned)
    assert sizes.total_bytes == wanted
    spec = MoESpec(hidden_size=4096, intermediate_size=1024, num_experts=128, top_k=8)
    share = DispatchShare(
        shape=RankShape.of(spec, num_local_experts=8),
        layout="tokens",
        rows=ranks_count * tokens,
        wire_format="bf16",
        ranks=ranks_count,
    )
    assert buffer_bytes(share) == wanted


@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(128, 7168, 256), (1, 2048, 8), (1024, 4096, 130)])
def test_deepep_buffers_are_as_large_as_the_library_asks(tokens, hidden, experts):
    kind = deepep_on_cpu.Buffer
    assert low_latency_size_hint(tokens, hidden, experts) == kind.get_low_latency_rdma_size_hint(
        tokens, hidden, 8, experts
    )
    for count in (2, 4, 8):
        hint = kind.get_dispatch_config(count).get_nvl_buffer_size_hint(2 * hidden, count)
        assert nvl_size_hint(2 * hidden, count) == hint


# --- plans ---------------------------------------------------------------------------------------------


def budget(prefill: int, dp_size: int) -> Budget:
    return Budget.from_limits(
        chunked_prefill_size=prefill, max_prefill_tokens=prefill, max_running_requests=64, dp_size=dp_size
    )


def planned(
    spec: MoESpec = MODEL, ranks_count: int = 4, prefill: int = 512, machine: str = "h200", **wishes
) -> MoEPlan:
    return plan(
        spec,
        topology=Topology(
            tp_size=ranks_count, dp_size=ranks_count, ep_size=ranks_count, enable_dp_attention=True
        ),
        budget=budget(prefill, ranks_count),
        hardware=hardware.named(machine),
        request=Wishes(**{"runner": "torch", "dispatcher": "deepep"} | wishes),
        compute_dtype="bfloat16",
    )


def used(chosen: MoEPlan) -> tuple[str, str]:
    return chosen.prefill.dispatcher, chosen.decode.dispatcher


def test_deepep_takes_normal_kernels_in_prefill_and_low_latency_in_decode():
    assert used(planned()) == ("deepep-normal", "deepep-low-latency")
    assert used(planned(dispatcher_mode="normal")) == ("deepep-normal",) * 2
    assert used(planned(dispatcher_mode="low_latency")) == ("deepep-low-latency",) * 2


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
    assert used(planned(prefill=1024, dispatcher_mode="low_latency"))
    with pytest.raises(PlanRefused, match=r"prefill steps of 1025 tokens.*at most 1024.* to 1024 or less"):
        planned(prefill=1025, dispatcher_mode="low_latency")
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
        planned(other, dispatcher_mode="low_latency")


def test_what_cannot_be_sent_is_refused_with_all_reasons():
    with pytest.raises(PlanRefused) as caught:
        planned(replace(MODEL, top_k=9), ranks_count=1, dispatcher="flashinfer")
    assert {r.asked for r in caught.value.refusals} >= {"--ep-size 1", "top-9 routing"}
    with pytest.raises(PlanRefused) as caught:
        planned(replace(MODEL, hidden_size=960), prefill=2000, dispatcher_mode="low_latency")
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
    found = planned(CALIBRATED, dispatch_format="nvfp4")
    assert used(found) == ("deepep-normal",) * 2
    assert found.prefill.wire_format == found.decode.wire_format == "nvfp4"
    with pytest.raises(PlanRefused, match=r"sends bf16, fp8, nvfp4 on compute capability 10\.0, 10\.3; the"):
        planned(CALIBRATED, dispatch_format="nvfp4", dispatcher_mode="low_latency")


def test_low_latency_kernels_feed_masked_ones_nvfp4_on_blackwell():
    wishes = {"runner": "flashinfer_cutedsl", "activation_format": "nvfp4"}
    found = planned(CALIBRATED, machine="b200", **wishes)
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
