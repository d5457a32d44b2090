"""Run by test_top_p.py with TRITON_INTERPRET=1: draws by top-p against numpy's sort; prints JSON."""

from __future__ import annotations

import json

import numpy as np
import torch
from torch import Tensor

from tests.kernels import interpreter
from turnout.kernels.common.top_p import draw_top_p

interpreter.prepare()
UNIFORMS = (0.0, 0.31, 0.5, 0.83, 1 - 2**-53)


def expected(probs_V: Tensor, limit: float, floor: float, number: float) -> int:
    order = np.argsort(-probs_V.numpy(), kind="stable")
    probs = probs_V.numpy()[order].astype(np.float64)
    probs[(probs.cumsum() - probs >= limit) | (probs < floor)] = 0
    sums = probs.cumsum()
    return int(order[np.searchsorted(sums, number * sums[-1], side="right")])


def draws(probs_V: Tensor, top_p: float, min_p: float = 0.0) -> bool:
    """The token of every uniform number, a row of each; and rows that are not to be looked at stay."""
    S = len(UNIFORMS)
    enough = torch.tensor([place == 2 for place in range(S)])
    limit = float(np.float32(top_p)) * probs_V.double().sum()
    floor = probs_V.amax() * min_p
    chosen = torch.full((S,), -5)
    draw_top_p(
        probs_V.expand(S, -1).contiguous(), enough, limit.repeat(S), floor.repeat(S),
        torch.tensor(UNIFORMS, dtype=torch.float64), chosen,
    )  # fmt: skip
    wanted = [expected(probs_V, limit.item(), floor.item(), number) for number in UNIFORMS]
    wanted[2] = -5
    return chosen.tolist() == wanted


def random_probs(vocabulary: int, scale: float, *, rounded: bool = False) -> Tensor:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * scale
    return torch.softmax(logits.bfloat16().float() if rounded else logits, -1)


def not_finite() -> bool:
    chosen = torch.full((1,), -5)
    one = torch.ones(1, dtype=torch.float64)
    nan = torch.full((1, 2000), float("nan"))
    draw_top_p(nan, torch.zeros(1, dtype=torch.bool), one * float("nan"), nan[:, 0], one / 2, chosen)
    return 0 <= chosen.item() < 2000


sparse = random_probs(5000, 3.0) * (torch.arange(5000) % 3 == 0)
print(
    json.dumps(
        {
            "flat": all(draws(random_probs(5000, 0.1), top_p) for top_p in (0.2, 0.999)),
            "peaked": all(draws(random_probs(9000, 3.0), top_p) for top_p in (0.2, 0.9)),
            "ties": all(draws(random_probs(4097, 0.1, rounded=True), top_p) for top_p in (0.3, 0.9)),
            "all equal": all(draws(torch.full((4096,), 2.0**-12), top_p) for top_p in (0.25, 0.7)),
            "floor within": draws(random_probs(5000, 1.0), 0.9, min_p=0.05),
            "floor below": draws(random_probs(5000, 1.0), 0.3, min_p=1e-4),
            "zeros": draws(sparse, 0.95) and draws(sparse, 0.9999),
            "not finite": not_finite(),
        }
    )
)
