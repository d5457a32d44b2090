"""What numpy finds on a CPU is what torch's operations find, which run elsewhere."""

from __future__ import annotations

import pytest
import torch

from turnout.engine.sampling import greedy as module
from turnout.engine.sampling.greedy import greedy


@pytest.mark.parametrize("near_ties", [False, True])
@pytest.mark.parametrize("kind", ["plain", "equal", "close", "infinite", "forbidden", "nan"])
def test_tokens_trust_and_near_ties_are_those_of_torch(kind: str, near_ties: bool):
    generator = torch.Generator().manual_seed(3)
    logits_SV = torch.randn(64, 300, generator=generator) * 10
    some_SV = torch.rand(64, 300, generator=generator) < 0.02
    low_S = None
    if kind == "equal":
        logits_SV[some_SV] = 50.0
    elif kind == "close":
        logits_SV[some_SV] = 50.0 + 0.01 * torch.rand(int(some_SV.sum()), generator=generator)
    elif kind == "infinite":
        logits_SV[some_SV] = float("inf")
    elif kind == "nan":
        logits_SV[some_SV] = float("nan")
    elif kind == "forbidden":
        low_S = logits_SV.amin(-1)
        logits_SV[:, 7:] = float("-inf")
        logits_SV[:8] = float("-inf")  # all of them
    expected = module._on_device(logits_SV.clone(), near_ties, low_S)
    found = greedy(logits_SV.clone(), near_ties=near_ties, low_S=low_S)
    assert found.dtype == expected.dtype == torch.int64
    assert torch.equal(found, expected)
    if kind in ("equal", "close") and near_ties:
        assert 0 < found[2].sum() <= 64
    if kind in ("infinite", "nan", "forbidden"):
        assert not found[1].all()


def test_no_rows():
    assert greedy(torch.empty(0, 5), near_ties=True).shape == (3, 0)
