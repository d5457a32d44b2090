"""Dispatchers that call a library, with the library, between GPUs: the layer's matrix, sizes and graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.moe.build import make_plan, make_setup
from tests.moe.exchange import Case, Finding, run
from tests.ranks import Pools, Rank
from turnout.moe.backends.deepep.buffers import low_latency_size_hint, nvl_size_hint
from turnout.moe.backends.flashinfer.buffers import WorkspaceSizes
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.spec import MoESpec
from turnout.parallel import hardware

pytestmark = pytest.mark.multigpu

LIBRARIES = {"flashinfer": "flashinfer", "deepep-normal": "deep_ep", "deepep-low-latency": "deep_ep"}
GPUS = [n for n in (2, 4) if n <= max(2, torch.cuda.device_count())]
TIMEOUT = 120  # seconds: kernels are loaded, memory is mapped


@dataclass(frozen=True, kw_only=True)
class LibraryCase(Case):
    device: str = "cuda"

    @property
    def spec(self) -> MoESpec:
        """The smallest hidden size for which all of them have kernels."""
        return replace(super().spec, hidden_size=2048)


def cases(dispatcher: str, ranks: int) -> list[LibraryCase]:
    plain = LibraryCase(dispatcher=dispatcher, world=ranks, ep=ranks, dp=ranks)
    quantised = [
        replace(plain, weights="mxfp4", wire="fp8"),
        replace(plain, weights="nvfp4", wire="nvfp4"),
        replace(plain, weights="nvfp4", activation_format="nvfp4", wire="nvfp4"),
    ]
    carried = DISPATCHERS[dispatcher].on(hardware.named("h200")).wire_formats
    return [plain, replace(plain, skewed=True), *(c for c in quantised if c.wire in carried)]


@pytest.fixture(params=LIBRARIES)
def dispatcher(request) -> str:
    pytest.importorskip(LIBRARIES[request.param])
    return request.param


@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize("count", GPUS)
def test_the_layer_against_the_reference(ranks: Pools, dispatcher, count):
    some = cases(dispatcher, count)
    found: list[Finding] = [f for own in ranks(count).run(run, some, timeout=TIMEOUT) for f in own]
    bad = [finding for finding in found if not finding.good]
    assert not bad, "\n".join(map(str, bad[:5]))
    assert {finding.case for finding in found} == set(some)


def replayed(rank: Rank, dispatcher: str) -> None:
    """A graph of one exchange, in which experts double what they get, against the same done eagerly."""
    spec = MoESpec(hidden_size=2048, intermediate_size=64, num_experts=8, top_k=2)
    groups = rank.groups("cuda", dp_size=rank.size, ep_size=rank.size)
    span = groups.topology.expert_range(8)
    layout = DISPATCHERS[dispatcher].layout
    chosen = make_plan(
        spec, dispatcher=dispatcher, layout=layout, first=span.start, count=len(span),
        compute_dtype="bfloat16",
    )  # fmt: skip
    device = torch.device("cuda", rank.number)
    sends = DISPATCHERS.load(dispatcher)(make_setup(spec, chosen, groups=groups, device=device))
    draw = torch.Generator(device=device).manual_seed(rank.number)
    x_TH = torch.empty(16, 2048, device=device, dtype=torch.bfloat16)
    ids_TK = torch.empty(16, 2, device=device, dtype=torch.int32)
    weights_TK = torch.full((16, 2), 0.5, device=device)

    def step() -> Tensor:
        batch, state = sends.dispatch(x_TH, ids_TK, weights_TK, [16] * rank.size)
        out = batch.hidden.data * 2
        if layout == "tokens":
            held_NK = (batch.topk_ids >= span.start) & (batch.topk_ids < span.stop)
            weight_N = batch.topk_weights.masked_fill(~held_NK, 0).sum(1)
            out = (out * weight_N[:, None]).to(torch.bfloat16)
        return sends.combine(out, state)

    def fill() -> None:
        x_TH.normal_(generator=draw)
        ids_TK[:, 0].random_(0, 4, generator=draw)
        ids_TK[:, 1] = ids_TK[:, 0] + 4
        ids_TK[::5] = -1

    fill()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y_TH = step()
    for _ in range(3):
        fill()
        graph.replay()
        replayed_TH = y_TH.clone()
        assert torch.equal(replayed_TH, step())
        want_TH = (2 * x_TH).masked_fill(ids_TK[:, :1] < 0, 0)
        torch.testing.assert_close(replayed_TH, want_TH, rtol=0.02, atol=0.02)
    torch.cuda.synchronize()


@pytest.mark.timeout(TIMEOUT + 30)
def test_a_graph_does_as_its_steps(ranks: Pools, dispatcher):
    if DISPATCHERS[dispatcher].graph_safe:
        ranks(2).run(replayed, dispatcher, timeout=TIMEOUT)


def sizes_of_flashinfer(rank: Rank) -> None:
    from flashinfer.comm.trtllm_moe_alltoall import moe_a2a_get_workspace_size_per_rank

    for n, tokens in ((2, 64), (4, 1000), (64, 8192)):
        sizes = WorkspaceSizes(ranks=n, capacity=tokens, sent=8192 + 64, returned=8192)
        assert sizes.total_bytes == moe_a2a_get_workspace_size_per_rank(n, tokens, sizes.sent, sizes.returned)


def sizes_of_deepep(rank: Rank) -> None:
    from deep_ep import Buffer

    for tokens, hidden, experts in ((128, 7168, 256), (1, 2048, 8), (1024, 4096, 130)):
        assert low_latency_size_hint(tokens, hidden, experts) == Buffer.get_low_latency_rdma_size_hint(
            tokens, hidden, 2, experts
        )
    for n in (2, 4, 8):
        for config in (Buffer.get_dispatch_config(n), Buffer.get_combine_config(n)):
            assert nvl_size_hint(8192, n) == config.get_nvl_buffer_size_hint(8192, n)


@pytest.mark.parametrize(
    ("library", "compare"), [("flashinfer", sizes_of_flashinfer), ("deep_ep", sizes_of_deepep)]
)
def test_buffers_are_as_large_as_the_library_asks(ranks: Pools, library, compare):
    pytest.importorskip(library)
    ranks(2).run(compare, timeout=TIMEOUT)
