"""Run by test_best_token.py with TRITON_INTERPRET=1: the best of each row against torch's; prints JSON."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from tests.kernels import interpreter
from turnout.kernels.common import best_token
from turnout.kernels.common.best_token import widen_and_choose

interpreter.prepare()
best_token.TOKENS = 64  # so that a row has several parts
INF = float("inf")


def chooses(x_SV: Tensor) -> bool:
    out_SV = torch.full(x_SV.shape, 7.0)
    ids_S, finite_S = widen_and_choose(x_SV, out_SV)
    values_S, wanted_S = x_SV.float().max(dim=-1)
    known = ~values_S.isnan()
    right = torch.equal(ids_S[known], wanted_S[known]) and torch.equal(finite_S.bool(), values_S.isfinite())
    return right and torch.equal(out_SV.nan_to_num(5.0), x_SV.float().nan_to_num(5.0))


def with_values(values: list[float]) -> Tensor:
    """A row for each: it stands twice, in other parts."""
    x_SV = torch.full((len(values), 200), -3.0)
    x_SV[:, 70] = x_SV[:, 150] = torch.tensor(values)
    return x_SV


torch.manual_seed(0)
rows = {
    "random": torch.randn(9, 1000),
    "one part": torch.randn(3, 40),
    "one row": torch.randn(1, 129),
    "16 bits": torch.randn(5, 300).half(),
    "ties": torch.randint(-2, 3, (20, 150)).float(),
    "zeros": torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0], [-0.0, -0.0, -5.0]]),
    "not finite": with_values([INF, float("nan"), -INF, 3e38, -3e38]),
    "none finite": torch.tensor([[-INF] * 70, [float("nan")] * 70]),
    "no rows": torch.zeros(0, 50),
}
print(json.dumps({name: chooses(x_SV) for name, x_SV in rows.items()}))
