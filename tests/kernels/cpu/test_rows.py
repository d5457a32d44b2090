"""The small compiled steps against what torch composes in float64."""

import pytest
import torch

from turnout.kernels.cpu import rows
from turnout.kernels.cpu.route import choose
from turnout.moe.routing import route
from turnout.moe.spec import Routing


@pytest.mark.parametrize("count", [0, 1, 3])
def test_norm(count):
    x, delta, weight = torch.randn(count, 48), torch.randn(count, 48), torch.randn(48)
    for added in (None, delta):
        total = x if added is None else x + added
        whole, normed = rows.norm(x, weight, 1e-6, added)
        assert torch.equal(whole, total)
        exact = total.double() / (total.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        torch.testing.assert_close(normed, exact.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normed", [True, False])
def test_rotate(normed):
    N, num_q, num_k, D = 3, 4, 2, 32
    heads, cos, sin = torch.randn(N, (num_q + 2 * num_k) * D), torch.randn(N, D), torch.randn(N, D)
    weight = torch.randn(num_q + num_k, D) if normed else None
    exact = heads.double().view(N, -1, D)[:, : num_q + num_k]
    if weight is not None:
        exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    exact = exact * cos[:, None] + exact.roll(D // 2, -1) * sin[:, None]
    q, k = rows.rotate(heads, num_q, num_k, cos, sin, weight, 1e-6)
    torch.testing.assert_close(torch.cat((q, k), 1), exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["softmax_topk", "topk_softmax"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_choose(kind, renormalize):
    torch.manual_seed(0)
    logits, counts = 3 * torch.randn(9, 40), torch.zeros(40, dtype=torch.int64)
    routing = Routing(kind=kind, renormalize=renormalize, scaling_factor=1.5)
    ids, weights = route(logits, routing, 5)
    real = torch.arange(9) % 4 != 3
    mine = choose(
        logits,
        5,
        of_all=kind == "softmax_topk",
        renormalize=renormalize,
        scaling=1.5,
        real_T=real,
        counts_E=counts,
    )
    assert torch.equal(mine[0], ids.masked_fill(~real[:, None], -1))
    torch.testing.assert_close(mine[1], weights * real[:, None], rtol=1e-5, atol=1e-7)
    assert torch.equal(counts, ids[real].flatten().long().bincount(minlength=40))


def test_equals_and_what_is_no_number():
    logits = torch.zeros(2, 8)
    logits[1, 2] = float("nan")
    counts = torch.zeros(8, dtype=torch.int64)
    ids, weights = choose(logits, 3, of_all=True, renormalize=True, scaling=1.0, real_T=None, counts_E=counts)
    assert ids[0].tolist() == [0, 1, 2]
    assert weights[1].isnan().all()
