"""Packing tokens for the wire in Triton's interpreter; with several GPUs test_exchange_gpu.py uses it."""

from __future__ import annotations

import pytest

from tests.kernels import interpreted


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/pack_in_interpreter.py")


@pytest.mark.parametrize("case", ["exact", "padded", "none", "some", "fp8", "nvfp4", "sum", "parts"])
def test_rows(results: dict[str, bool], case: str):
    assert results[case]
