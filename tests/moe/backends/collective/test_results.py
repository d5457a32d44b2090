"""Results of experts that ranks send each other: in FP8 as ml_dtypes rounds."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.moe.build import make_plan, make_setup, make_spec
from turnout.moe.backends.collective.results import Results
from turnout.vocabulary import Format

BLOCK, LARGEST = 128, 448.0  # columns with one scale; the largest e4m3


def results(combine_format: Format, dtype: str = "float32", hidden: int = 256) -> Results:
    spec = make_spec(hidden_size=hidden)
    plan = make_plan(spec, compute_dtype=dtype)
    phase = replace(plan.decode, combine_format=combine_format)
    return Results(make_setup(spec, replace(plan, decode=phase)))


def test_results_in_the_compute_dtype_are_sent_as_they_are():
    kept, x_NH = results(Format.BF16, "bfloat16"), torch.randn(5, 256)
    assert torch.equal(kept.decode(kept.encode(x_NH)), x_NH.bfloat16())


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_results_in_fp8_are_rounded_by_row_and_block(rows: int):
    kept, x_NH = results(Format.FP8), torch.randn(rows, 256) * 10
    x_NH[:, 130] = 300  # an outlier is in the scale of its own block
    sent_NW = kept.encode(x_NH)
    assert sent_NW.shape == (rows, (256 + 2 * 4) // 8), "256 bytes and two float32 scales, in words of 8"
    blocks = x_NH.numpy().reshape(rows, 2, BLOCK)
    scale = (np.abs(blocks).max(-1, keepdims=True) / LARGEST).astype(np.float32)
    expected = (blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_allclose(kept.decode(sent_NW), expected.reshape(rows, 256), rtol=1e-6)
