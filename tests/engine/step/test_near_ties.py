"""What counts as a close call, and the computation that settles one."""

from __future__ import annotations

import pytest
import torch

from tests.engine.toy import ToyModel
from turnout.engine.sampling.greedy import CLOSE, find_near_ties
from turnout.engine.step.near_ties import BLOCK, recomputed_logits


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_recomputed_logits_are_the_models(length: int) -> None:
    model = ToyModel()
    tokens = [(7 * i) % 49 for i in range(length)]
    got = recomputed_logits(model, tokens, torch.device("cpu"))
    torch.testing.assert_close(got, model.reference_logits(tokens)[-1:], rtol=1e-4, atol=1e-4)
    assert max(model.steps) <= BLOCK


def test_close_calls() -> None:
    spread = 10.0
    rows = [
        [0.0, spread, spread * (1 - 0.9 * CLOSE)],
        [0.0, spread, spread * (1 - 1.1 * CLOSE)],
        [0.0, spread, spread],
        [spread, 0.0, 5.0],
        [-spread, -20 + 0.5 * CLOSE, -20.0],
    ]
    logits = torch.tensor(rows, dtype=torch.float64)
    best = logits.argmax(-1)
    assert find_near_ties(logits, best).tolist() == [True, False, True, False, False]
