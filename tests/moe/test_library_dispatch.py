"""Dispatchers that call a library, on CPU ranks: the layer's matrix over the library's documented semantics.

FlashInfer's own Python runs, over kernels in plain torch (flashinfer_on_cpu.py); DeepEP is a class with the
documented signatures (deepep_on_cpu.py). Both check every argument they are given. test_library_gpu.py runs
the libraries themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from tests.moe.backends.deepep import deepep_on_cpu
from tests.moe.backends.flashinfer import flashinfer_on_cpu
from tests.moe.build import make_experts, make_plan, make_setup, make_spec
from tests.moe.exchange import Case, Finding, held, inputs, run
from tests.ranks import Pools, Rank
from turnout.moe.capabilities.capability import DispatcherCapability
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.capabilities.limits import Limits
from turnout.moe.reference import experts_reference

SUBSTITUTES = {
    "flashinfer": flashinfer_on_cpu,
    "deepep-normal": deepep_on_cpu,
    "deepep-low-latency": deepep_on_cpu,
}
CARRIES = {name: DISPATCHERS[name].wire_formats for name in SUBSTITUTES}


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
        assert int((batch.topk_ids >= 0).any(1).sum()) <= real, "rows that no rank sent go to experts"
    y_TH = sends.combine(runner(batch), state)
    ref_TH = experts_reference(x_TH.float().nan_to_num(), ids_TK, weights_TK, experts, spec.activation)
    torch.testing.assert_close(y_TH.float(), ref_TH, rtol=0.05, atol=0.1)
    assert not y_TH[gone].any()
    batch, state = sends.dispatch(x_TH[:0], ids_TK[:0], weights_TK[:0], [0] * rank.size)
    assert sends.combine(runner(batch), state).shape == (0, x_TH.shape[1])


@pytest.mark.parametrize("dispatcher", SUBSTITUTES)
def test_padding_comes_out_as_zero(ranks: Pools, dispatcher):
    ranks(4).run(padded, dispatcher)
