"""Residual streams and turned heads in Triton's interpreter, and on a GPU at real sizes, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import interpreted
from tests.kernels.compiled import compiled
from turnout.models.blocks import Norm
from turnout.models.compressed_attention import turned
from turnout.models.spec import StreamSpec
from turnout.models.streams import StreamWeights

CASES = ["added", "parts", "many", "embedding", "none", "turn", "turn-back", "turn-normed"]


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/streams_in_interpreter.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


def test_compiled_for_hopper():
    """At the sizes of DeepSeek-V4-Flash, with products on tensor cores."""
    from turnout.kernels.common.streams import COLUMNS, MIXED, ROWS, stream_mixture, stream_products

    halves = dict.fromkeys(("x_ptr", "total_ptr", "gain_ptr", "mixed_ptr"), "*bf16")
    sizes = {"S": 4, "C": 24, "CP": 32, "PDL": True}
    for added, y in ((0, "*bf16"), (1, "*bf16"), (8, "*fp32")):
        constants = sizes | {"ADDED": added, "ROWS": ROWS, "COLUMNS": COLUMNS}
        done = compiled(stream_products, constants, warps=4, multiples=("H",), y_ptr=y, **halves)
        assert "mma.sync" in done.asm["ptx"]
    constants = sizes | {"BP": 128, "ITERATIONS": 20, "BLOCK": MIXED, "eps": 1e-6, "norm_eps": 1e-6}
    for blocks in (1, 8):
        more = {"BLOCKS": blocks, "gain_eps": 1e-6}
        compiled(stream_mixture, constants | more, warps=4, multiples=("H",), **halves)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 33, 4000])
def test_streams_on_a_gpu(rows: int):
    torch.manual_seed(0)
    parts = {
        "fn": torch.randn(24, 4 * 4096) / 64,
        "base": torch.randn(24),
        "scale": torch.tensor([1.5, 0.7, 1.2]),
    }
    spec = StreamSpec(count=4, iterations=20, eps=1e-6)
    x, y = torch.randn(rows, 4, 4096).bfloat16(), torch.randn(rows, 4096).bfloat16()
    post, gain = torch.rand(rows, 4), torch.rand(4096).bfloat16()
    on_gpu = StreamWeights(spec=spec, norm_eps=1e-6, **{k: v.cuda() for k, v in parts.items()})
    found = on_gpu.of_sum(x.cuda(), (post.cuda(), y.cuda()), Norm(gain.cuda(), 1e-6))
    wanted = StreamWeights(spec=spec, norm_eps=1e-6, **parts).of_sum(x, (post, y), Norm(gain, 1e-6))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("rows", [1, 3000])
def test_turned_heads_on_a_gpu(rows: int, back: bool):
    torch.manual_seed(0)
    x, angles = torch.randn(rows, 64, 512).bfloat16(), torch.randn(rows, 1, 32)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    found = turned(x.cuda(), (cos.cuda(), sin.cuda()), back=back)
    torch.testing.assert_close(found.cpu(), turned(x, (cos, sin), back=back), rtol=2e-2, atol=2e-2)
