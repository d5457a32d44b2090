"""The layer between GPUs, over NCCL: the matrix of test_exchange.py in bfloat16, on as many as there are."""

from __future__ import annotations

import pytest
import torch

from tests.moe.exchange import LOCAL_DISPATCHERS, run
from tests.moe.exchange import cases as exchange_cases
from tests.ranks import Pools, Rank
from turnout.parallel.groups import shares

pytestmark = pytest.mark.multigpu

GPUS = max(2, torch.cuda.device_count())
PARALLEL_LAYOUTS = [(ep, tp) for ep in (1, 2, 4) for tp in (1, 2) if 1 < ep * tp <= GPUS]
TIMEOUT = 240  # seconds: kernels are loaded and NCCL connects


@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize(("ep", "tp"), PARALLEL_LAYOUTS)
@pytest.mark.parametrize("dispatcher", [*LOCAL_DISPATCHERS, "nvlink", "nvlink-experts"])
def test_the_layer_against_the_reference(ranks: Pools, dispatcher, ep, tp):
    some = list(exchange_cases(dispatcher, ep, tp, device="cuda"))
    found = [finding for own in ranks(ep * tp).run(run, some, timeout=TIMEOUT) for finding in own]
    bad = [finding for finding in found if not finding.good]
    assert not bad, "\n".join(map(str, bad[:5]))
    assert {finding.case for finding in found} == set(some)


def collectives(rank: Rank) -> None:
    """Each against plain arithmetic on integers, which no order of summation changes."""
    group, n = rank.groups("cuda").world, rank.size
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for counts in ([0] * n, [2] * n, [5] + [0] * (n - 1), shares(7, n)):
            parts = [
                torch.arange(4 * c).view(c, 4).add(10 * r).to("cuda", dtype) for r, c in enumerate(counts)
            ]
            assert torch.equal(group.all_gather(parts[rank.number], counts), torch.cat(parts))
            total = sum(counts)
            wholes = [torch.arange(2 * total).view(total, 2).add(r).to("cuda", dtype) for r in range(n)]
            mine = torch.stack(wholes).sum(0).to(dtype).split(counts)[rank.number]
            assert torch.equal(group.reduce_scatter(wholes[rank.number], counts), mine)
        sizes = [[(r + 2 * to) % 3 for to in range(n)] for r in range(n)]
        sent = [[torch.full((sizes[r][to], 3), 7 * r + to) for to in range(n)] for r in range(n)]
        receive = [sizes[r][rank.number] for r in range(n)]
        got = group.all_to_all(torch.cat(sent[rank.number]).to("cuda", dtype), sizes[rank.number], receive)
        assert torch.equal(got, torch.cat([sent[r][rank.number] for r in range(n)]).to("cuda", dtype))
        ones = torch.ones(3, device="cuda", dtype=dtype)
        assert torch.equal(group.all_reduce(ones), torch.full_like(ones, n))
    on_host = torch.full((2,), float(rank.number))
    assert group.all_reduce(on_host).tolist() == [sum(range(n))] * 2


def test_collectives_of_nccl(ranks: Pools):
    ranks(2).run(collectives, timeout=TIMEOUT)
