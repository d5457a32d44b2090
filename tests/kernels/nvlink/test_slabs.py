"""Rows to a slab per expert and back, in Triton's interpreter."""

from __future__ import annotations

from tests.kernels import interpreted


def test_rows_reach_their_slabs_and_sums_their_rows():
    assert interpreted.results("nvlink/slabs_in_interpreter.py") == {
        "several": True,
        "one each": True,
        "none": True,
    }
