"""Latent attention in Triton's interpreter, against a softmax written out; and on a GPU, at real sizes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import interpreted


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("attention/latent_in_interpreter.py")


CASES = ["short", "splits", "padding", "odd-heads", "many-heads", "deepseek", "no-rows", "steps"]


@pytest.mark.parametrize("case", CASES)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("H", [16, 20, 128])
def test_on_a_gpu(H: int, splits: int, heads: int):
    from turnout.kernels.attention.latent import attend

    torch.manual_seed(0)
    ends, page = torch.tensor([1, 0, 4000, 777, 16]), 16
    pages = torch.randperm(5 * 256).view(5, 256)
    q, cache = torch.randn(5, H, 576).bfloat16(), torch.randn(5 * 256 * page, 576).bfloat16()
    given = (t.cuda() for t in (q, cache, pages, ends))
    found = attend(*given, latent_dim=512, page_size=page, splits=splits, scale=576**-0.5, heads=heads).cpu()
    for b, end in enumerate(ends.tolist()):
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[:end]
        kept = cache[slots].double()
        wanted = (q[b].double() @ kept.T * 576**-0.5).softmax(-1) @ kept[:, :512] if end else 0
        assert (found[b].double() - wanted).abs().max() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("prefix", [0, 1500])
def test_expanded_on_a_gpu(dtype: torch.dtype, prefix: int):
    """Spans by torch's fused kernels, whose log-sum-exp joins them."""
    from turnout.attention.latent import attend_expanded
    from turnout.attention.up_projection import UpProjection

    torch.manual_seed(0)
    length, H = prefix + 1300, 16
    up = UpProjection((torch.randn(H, 256, 512, device="cuda") * 0.04).to(dtype), 128)
    q = torch.randn(length, H, 192, device="cuda").to(dtype)
    latent = torch.randn(length, 576, device="cuda").to(dtype)
    earlier = latent, torch.arange(prefix, device="cuda") if prefix else None
    out = attend_expanded(q[prefix:], latent[prefix:], up, 192**-0.5, earlier)
    wide = UpProjection(up.weight_HXL.double(), 128)
    k, v = wide.expand(latent.double())
    scores = q[prefix:].double().transpose(0, 1) @ k.transpose(1, 2) * 192**-0.5
    seen = torch.ones(length, length, device="cuda").tril().bool()[prefix:]
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    assert (out.transpose(0, 1) - wanted).abs().max() < (3e-2 if dtype == torch.bfloat16 else 1e-4)
