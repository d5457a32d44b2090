"""The sorting kernels in Triton's interpreter, against torch's own sort."""

from __future__ import annotations

import pytest

from tests.kernels import interpreted


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("hopper/sort_in_interpreter.py")


@pytest.mark.parametrize(
    "case",
    [
        "few", "one", "blocks", "one-expert", "other-ranks", "widest-first", "widest-first-alone", "padding",
        "batched", "sum", "sum-bf16", "places", "sum-places-False", "sum-places-True",
    ],
)  # fmt: skip
def test_kernel(results: dict[str, bool], case: str):
    assert results[case]
