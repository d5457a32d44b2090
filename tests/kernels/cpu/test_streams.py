"""Weights of residual streams by one kernel, against torch in float64."""

from __future__ import annotations

import pytest
import torch

from turnout.kernels.cpu.streams import weights
from turnout.models.spec import StreamSpec
from turnout.models.streams import composed


@pytest.mark.parametrize("count", [1, 2, 4, 5])
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_weights(count: int, tokens: int, iterations: int):
    generator = torch.Generator().manual_seed(tokens)
    C = count * (count + 2)
    products, base = (torch.randn(*size, generator=generator) for size in ((tokens, C + 3), (C,)))
    products, scale = 4 * products[:, :C], torch.tensor([0.7, 1.3, 2.0])  # rows that do not follow each other
    spec = StreamSpec(count=count, iterations=iterations, eps=1e-6)
    wanted = composed(products.double(), base.double(), scale.double(), spec)
    found = weights(products, base, scale, count=count, iterations=iterations, eps=spec.eps)
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=2e-6)


def test_large_products_are_finite():
    found = weights(
        torch.tensor([[1e4, -1e4, 1e4, -1e4, 1e4, -1e4, 1e4, -1e4]]),
        torch.zeros(8),
        torch.ones(3),
        count=2,
        iterations=20,
        eps=1e-6,
    )
    assert all(bool(each.isfinite().all()) for each in found)


def test_a_token_that_is_no_number_spoils_no_other():
    products, spec = torch.zeros(3, 8), StreamSpec(count=2, iterations=3, eps=1e-6)
    products[1] = torch.nan
    found = weights(products, torch.zeros(8), torch.ones(3), count=2, iterations=3, eps=spec.eps)
    for each in found:
        assert bool(each[1].isnan().all())
        assert bool(each[[0, 2]].isfinite().all())
