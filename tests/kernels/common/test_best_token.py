"""The best of each row of logits: in Triton's interpreter, and on a GPU against torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import interpreted
from turnout.engine.sampling.greedy import greedy

CASES = [
    "random", "one part", "one row", "16 bits", "ties", "zeros", "not finite", "none finite", "no rows",
]  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/best_token_in_interpreter.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("size", [151_936, 129_280, 50_257])
def test_choices_on_a_gpu(rows: int, size: int):
    """Of whole numbers among others, which are often equal."""
    from turnout.kernels.common.best_token import widen_and_choose

    torch.manual_seed(0)
    x = torch.randn(rows, size, device="cuda").bfloat16()
    x[rows // 2] = x[rows // 2].round()
    x[-1, 77] = float("nan") if rows > 1 else 1.0
    out = torch.empty(rows, size, device="cuda")
    found, wanted = widen_and_choose(x, out), greedy(x.float(), near_ties=False)
    assert torch.equal(out.nan_to_num(3.0), x.float().nan_to_num(3.0))
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[0][wanted[1].bool()], wanted[0][wanted[1].bool()])
