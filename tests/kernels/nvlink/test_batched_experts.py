"""Rows to the layout "batched_experts" and back, in Triton's interpreter."""

from __future__ import annotations

from tests.kernels import interpreted


def test_rows_reach_their_experts_and_sums_their_rows():
    assert interpreted.results("nvlink/batched_experts_in_interpreter.py") == {
        "several": True,
        "one each": True,
        "none": True,
    }
