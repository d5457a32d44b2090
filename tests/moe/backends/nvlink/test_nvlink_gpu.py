"""Dispatcher "nvlink" between GPUs: graphs of different sizes, a long soak, and peers that do not come.

The layer through it against the reference is in test_exchange_gpu.py. Here experts are a factor that differs
by expert, so that what must come back is known to the bit.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.moe.build import make_plan, make_setup, make_spec
from tests.ranks import Pools, Rank, RankFailed
from turnout.moe.backends.nvlink import buffers
from turnout.moe.backends.nvlink.dispatcher import NvlinkDispatch
from turnout.parallel.symmetric import PeerError

pytestmark = pytest.mark.multigpu

GPUS = max(2, torch.cuda.device_count())
HIDDEN, EXPERTS, TOP_K, CAPACITY = 2048, 32, 4, 64
FEW = 16  # tokens that are sent in words; more by flags
REPLAYS = 100_000
TIMEOUT = 240


def built(rank: Rank) -> tuple[NvlinkDispatch, range, torch.device]:
    buffers.FEW_TOKENS = FEW
    groups = rank.groups("cuda", dp_size=rank.size, ep_size=rank.size)
    spec = make_spec(hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
    span = groups.topology.expert_range(EXPERTS)
    plan = make_plan(
        spec, dispatcher="nvlink", first=span.start, count=len(span), compute_dtype="bfloat16",
        max_tokens=CAPACITY * rank.size,
    )  # fmt: skip
    device = torch.device("cuda", rank.number)
    return NvlinkDispatch(make_setup(spec, plan, groups=groups, device=device)), span, device


def factors(ids_NK: Tensor, weights_NK: Tensor, span: range) -> Tensor:
    """[N, 1], summed in one order whatever N is."""
    total_N1 = torch.zeros(len(ids_NK), 1, device=ids_NK.device)
    for ids_N, weights_N in zip(ids_NK.unbind(1), weights_NK.unbind(1), strict=True):
        held_N = (ids_N >= span.start) & (ids_N < span.stop)
        total_N1 = total_N1 + torch.where(held_N, weights_N * (ids_N % 7 + 1), 0.0)[:, None]
    return total_N1


def drawn(tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, a random number of which are padding; everything is decided on the device."""
    x_TH = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    ids_TK = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K).indices.int()
    ids_TK = torch.where(torch.rand(1, device=device) < 0.1, ids_TK % (EXPERTS // 8), ids_TK)  # to one rank
    real_T = torch.arange(tokens, device=device) < torch.rand(1, device=device) * 1.2 * tokens - 0.1 * tokens
    return (
        x_TH,
        torch.where(real_T[:, None], ids_TK, -1),
        torch.rand(tokens, TOP_K, device=device) * real_T[:, None],
    )


def exchange(dispatcher: NvlinkDispatch, span: range, counts: list[int], rank: int) -> Tensor:
    """int64 [1]: how many values of one step, with random tokens, are wrong."""
    device, ranks = dispatcher.exchange._device, len(counts)
    x_TH, ids_TK, weights_TK = drawn(counts[rank], device)
    batch, state = dispatcher.dispatch(x_TH, ids_TK, weights_TK, counts)
    out = batch.hidden.data.float() * factors(batch.topk_ids, batch.topk_weights, span)
    got_TH = dispatcher.combine(out.bfloat16(), state)
    total_TH = torch.zeros(x_TH.shape, device=device)
    for r in range(ranks):
        theirs = range(r * len(span), (r + 1) * len(span))
        total_TH += (x_TH.float() * factors(ids_TK, weights_TK, theirs)).bfloat16().float()
    return (got_TH != total_TH.bfloat16()).sum()


def soak(rank: Rank, replays: int) -> int:
    """Graphs of three sizes, two in words and one by flags, taken in turn; random tokens in each replay."""
    dispatcher, span, device = built(rank)
    torch.manual_seed(rank.number)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    graphs = []
    with torch.inference_mode():
        for tokens in (1, 16, CAPACITY):
            for _ in range(2):
                exchange(dispatcher, span, [tokens] * rank.size, rank.number)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                for _ in range(10):
                    wrong += exchange(dispatcher, span, [tokens] * rank.size, rank.number)
        wrong.zero_()
        for i in range(replays // 10):
            graphs[i % 3].replay()
            if i % 100 == 0:
                torch.cuda.synchronize()
                dispatcher.exchange.check()
        torch.cuda.synchronize()
    dispatcher.exchange.check()
    return int(wrong)


@pytest.mark.timeout(TIMEOUT + 30)
def test_every_result_of_a_soak_is_right(ranks: Pools):
    assert ranks(2).run(soak, REPLAYS, timeout=TIMEOUT) == [0, 0]


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
@pytest.mark.timeout(TIMEOUT + 30)
def test_a_shorter_soak_between_four(ranks: Pools):
    assert ranks(4).run(soak, REPLAYS // 5, timeout=TIMEOUT) == [0] * 4


def uneven(rank: Rank) -> list[int]:
    """Eager steps with other numbers of tokens on every rank, none among them."""
    dispatcher, span, _ = built(rank)
    torch.manual_seed(rank.number)
    found = []
    with torch.inference_mode():
        for step in ([0, 0], [1, 0], [0, CAPACITY], [CAPACITY, CAPACITY], [3, 17], [0, 1]):
            counts = [step[r % 2] for r in range(rank.size)]
            found.append(int(exchange(dispatcher, span, counts, rank.number)))
    dispatcher.exchange.check()
    return found


def test_any_number_of_tokens_on_any_rank(ranks: Pools):
    assert ranks(2).run(uneven, timeout=TIMEOUT) == [[0] * 6] * 2


def mixed(rank: Rank) -> int:
    """Ranks replay graphs of different sizes, of which all have room for the most that any rank brings."""
    dispatcher, span, device = built(rank)
    torch.manual_seed(rank.number)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    room = (16, CAPACITY)[rank.number % 2]
    counts = [room] * rank.size
    counts[rank.number] = 8
    with torch.inference_mode():
        exchange(dispatcher, span, counts, rank.number)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wrong += exchange(dispatcher, span, counts, rank.number)
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
    dispatcher.exchange.check()
    return int(wrong)


def test_graphs_of_different_sizes_work_together(ranks: Pools):
    assert ranks(2).run(mixed, timeout=TIMEOUT) == [0, 0]


def deserted(rank: Rank) -> str:
    """Rank 1 makes one call fewer; what rank 0 says, and how long it takes."""
    dispatcher, span, device = built(rank)
    object.__setattr__(dispatcher.exchange._links[0], "limit_seconds", 1.0)
    exchange(dispatcher, span, [4] * rank.size, rank.number)
    torch.cuda.synchronize()
    if rank.number == 1:
        time.sleep(3)
        return ""
    began = time.monotonic()
    exchange(dispatcher, span, [4] * rank.size, rank.number)
    torch.cuda.synchronize()
    assert 0.5 < time.monotonic() - began < 2.5
    with pytest.raises(PeerError) as told:
        dispatcher.dispatch(*drawn(4, device), [4] * rank.size)
    return str(told.value)


def test_a_peer_that_does_not_come_is_named(ranks: Pools):
    pool = ranks(2)
    said = pool.run(deserted, timeout=TIMEOUT)[0]
    pool.close()  # what this region was used for has failed
    assert "rank 0 gave up waiting for rank 1 in dispatch of epoch 2" in said


def killed(rank: Rank, said: Path) -> None:
    """Rank 1 ends without a word between two exchanges; what rank 0 says is left in a file."""
    dispatcher, span, _ = built(rank)
    object.__setattr__(dispatcher.exchange._links[0], "limit_seconds", 1.0)
    exchange(dispatcher, span, [4] * rank.size, rank.number)
    torch.cuda.synchronize()
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    exchange(dispatcher, span, [4] * rank.size, rank.number)
    torch.cuda.synchronize()
    try:
        dispatcher.exchange.check()
    except PeerError as told:
        said.write_text(str(told))


def test_a_peer_that_died_is_named(ranks: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.ranks.GRACE", 20.0)  # rank 0 is to have its say
    with pytest.raises(RankFailed, match="rank 1 died"):
        ranks(2).run(killed, tmp_path / "said", timeout=TIMEOUT)
    assert "rank 0 gave up waiting for rank 1 in dispatch of epoch 2" in (tmp_path / "said").read_text()


def stalled(rank: Rank) -> int:
    """A rank is late by 0.3 s, on the host and then on the device, before its dispatch and its combine."""
    dispatcher, span, device = built(rank)
    torch.manual_seed(rank.number)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    second = 1_500_000_000  # cycles, about
    for late in range(rank.size):
        for tokens in (4, CAPACITY):
            if rank.number == late:
                time.sleep(0.3)
            wrong += exchange(dispatcher, span, [tokens] * rank.size, rank.number)
            if rank.number == late:
                torch.cuda._sleep(second // 3)
            batch, state = dispatcher.dispatch(*drawn(tokens, device), [tokens] * rank.size)
            if rank.number == late:
                torch.cuda._sleep(second // 3)
            dispatcher.combine(batch.hidden.data, state)
            wrong += exchange(dispatcher, span, [tokens] * rank.size, rank.number)
    torch.cuda.synchronize()
    dispatcher.exchange.check()
    return int(wrong)


def test_a_late_peer_is_waited_for(ranks: Pools):
    assert ranks(2).run(stalled, timeout=TIMEOUT) == [0, 0]


def overfull(rank: Rank) -> str:
    """Rank 1 believes that rank 0 brings less than it does."""
    dispatcher, _, device = built(rank)
    with pytest.raises(ValueError, match=f"buffers hold {CAPACITY}"):
        dispatcher.dispatch(*drawn(CAPACITY + 1, device), [CAPACITY + 1] * 2)
    counts = [4, 4] if rank.number == 1 else [8, 4]
    dispatcher.dispatch(*drawn(counts[rank.number], device), counts)
    torch.cuda.synchronize()
    try:
        dispatcher.exchange.check()
    except PeerError as told:
        return str(told)
    return ""


def test_more_tokens_than_were_announced_are_an_error(ranks: Pools):
    pool = ranks(2)
    first, second = pool.run(overfull, timeout=TIMEOUT)
    pool.close()
    assert first == ""
    assert "rank 1: rank 0 brought 8 tokens" in second
