"""Residual streams and turned heads in Triton's interpreter, and on a GPU at real sizes, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import interpreted
from turnout.models.compressed_attention import turned
from turnout.models.spec import StreamSpec
from turnout.models.streams import StreamWeights

CASES = ["post", "streams", "embedding", "none", "turn", "turn-back", "turn-normed"]


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("common/streams_in_interpreter.py")


@pytest.mark.parametrize("case", CASES)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


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
    post = torch.rand(rows, 4)
    on_gpu = StreamWeights(spec=spec, norm_eps=1e-6, **{k: v.cuda() for k, v in parts.items()})
    found = on_gpu.of_sum(x.cuda(), (post.cuda(), y.cuda()))
    wanted = StreamWeights(spec=spec, norm_eps=1e-6, **parts).of_sum(x, (post, y))
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
