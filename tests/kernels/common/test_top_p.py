"""Draws by top-p over whole vocabularies: in Triton's interpreter, and on a GPU against the CPU's sort."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels import interpreted
from tests.kernels.compiled import compiled
from turnout.engine.sampling.sampler import draw_ordered, uniform
from turnout.engine.sampling_params import SamplingParams
from turnout.kernels.common import top_p


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/top_p_in_interpreter.py")


@pytest.mark.parametrize(
    "case", ["flat", "peaked", "ties", "all equal", "floor within", "floor below", "zeros", "not finite"]
)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


def test_it_compiles_for_hopper():
    types = {
        "enough_ptr": "*i1", "limit_ptr": "*fp64", "uniform_ptr": "*fp64", "chosen_ptr": "*i64",
    }  # fmt: skip
    done = compiled(
        top_p.draw, {"V": 151_936, "TOKENS": top_p.TOKENS}, warps=top_p.WARPS, multiples=(), **types
    )
    assert done.asm["cubin"]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
def test_on_a_gpu_nothing_waits_and_tokens_are_the_cpus(rows: int):
    """Flat rows and peaked ones, alone and together with all fields."""
    draw = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 151_936, generator=draw) * torch.linspace(0.1, 4, rows)[:, None]
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9}, {"top_p": 0.95, "min_p": 0.02}, {"top_k": 50, "top_p": 0.9}, {"top_p": 1e-6},
        {"top_k": 5000, "top_p": 0.9},
    ]  # fmt: skip
    probs = logits.double().softmax(-1)
    for shift in range(len(kinds)):
        params = [SamplingParams(temperature=1.0, **kinds[(i + shift) % len(kinds)]) for i in range(rows)]
        uniforms = [uniform(shift, row) for row in range(rows)]
        on_gpu = logits.cuda()
        draw_ordered(on_gpu, params, uniforms)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = draw_ordered(on_gpu, params, uniforms)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        wanted = draw_ordered(logits, params, uniforms)
        # Softmax of the two devices differs by rounding, which may move a draw to the next token in order.
        for row, (a, b) in enumerate(zip(found.tolist(), wanted.tolist(), strict=True)):
            assert abs(probs[row, a] / probs[row, b] - 1) < 1e-3, (row, a, b, params[row])
