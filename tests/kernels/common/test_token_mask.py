"""Tokens that may not follow, forbidden by bits: in Triton's interpreter, and on a GPU at real sizes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import interpreted


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/token_mask_in_interpreter.py")


@pytest.mark.parametrize("case", ["even", "odd", "wide", "none"])
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 151_936), (64, 151_936), (300, 1000)])
def test_on_a_gpu(rows: int, vocabulary: int):
    from turnout.engine.sampling.token_masks import forbid

    torch.manual_seed(0)
    logits = torch.randn(rows, vocabulary)
    allowed = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), dtype=torch.int32)
    found = logits.cuda()
    forbid(found, allowed.cuda())
    forbid(logits, allowed)
    assert torch.equal(found.cpu(), logits)
