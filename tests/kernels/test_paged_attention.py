"""Attention and products by rows in Triton's interpreter, against torch's; and on a GPU, at real sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import interpreted


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("attention_in_interpreter.py")


@pytest.mark.parametrize(
    "case",
    ["short", "pages", "splits", "padding", "odd-heads", "one-kv-head", "product", "product-odd"],
)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 8])
def test_on_a_gpu(dtype: torch.dtype, splits: int):
    from turnout.kernels.paged_attention import attend

    torch.manual_seed(0)
    ends, Hq, Hkv, D, page = torch.tensor([1, 0, 4000, 777, 16]), 32, 4, 128, 16
    pages = torch.randperm(5 * 256).view(5, 256)
    q = torch.randn(5, Hq, D).to(dtype)
    cache = torch.randn(Hkv, 5 * 256 * page, 2, D).to(dtype)
    found = attend(*(t.cuda() for t in (q, cache, pages, ends)), page_size=page, splits=splits).cpu()
    for b, end in enumerate(ends.tolist()):
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[:end]
        k, v = (x.double().repeat_interleave(Hq // Hkv, 0) for x in cache[:, slots].unbind(2))
        wanted = F.scaled_dot_product_attention(q[b, :, None].double(), k, v)[:, 0] if end else 0
        error = (found[b].double() - wanted).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)
