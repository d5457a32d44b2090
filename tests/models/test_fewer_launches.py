"""Layers give the same where kernels do what several launches do otherwise, in the interpreter."""

from __future__ import annotations

import pytest

from tests.kernels import interpreted


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.printed("tests.models.layers_in_interpreter")


@pytest.mark.parametrize("case", ["attention", "attention-sinks", "softmax", "parts", "topk", "padding"])
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]
