"""Attention and products by rows in Triton's interpreter, against torch's; and on a GPU, at real sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import interpreted


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("attention/attention_in_interpreter.py")


@pytest.mark.parametrize(
    "case",
    [
        "short",
        "pages",
        "splits",
        "many-splits",
        "padding",
        "odd-heads",
        "one-kv-head",
        "prompts",
        "prompts-odd",
        "window",
        "sinks",
        "window-sinks",
        "large-heads",
        "prompts-window",
        "prompts-sinks",
        "prompts-window-sinks",
        "prompts-large-heads",
        "parts",
        "product",
        "product-odd",
    ],
)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 8])
def test_on_a_gpu(dtype: torch.dtype, splits: int):
    from turnout.kernels.attention.decode import attend

    torch.manual_seed(0)
    ends, Hq, Hkv, D, page = torch.tensor([1, 0, 4000, 777, 16]), 32, 4, 128, 16
    pages = torch.randperm(5 * 256).view(5, 256)
    q = torch.randn(5, Hq, D).to(dtype)
    cache = torch.randn(Hkv, 5 * 256 * page, 2, D).to(dtype)
    given = (t.cuda() for t in (q, cache, pages, ends))
    found = attend(*given, page_size=page, splits=splits, scale=D**-0.5).cpu()
    for b, end in enumerate(ends.tolist()):
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[:end]
        k, v = (x.double().repeat_interleave(Hq // Hkv, 0) for x in cache[:, slots].unbind(2))
        wanted = F.scaled_dot_product_attention(q[b, :, None].double(), k, v)[:, 0] if end else 0
        error = (found[b].double() - wanted).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("Hq", "Hkv", "D"), [(32, 4, 128), (16, 16, 64), (12, 2, 96)])
def test_prompts_on_a_gpu(Hq: int, Hkv: int, D: int):
    """Whole prompts, one token, and chunks behind a long context, against attention in float64."""
    from turnout.kernels.attention import prefill

    torch.manual_seed(0)
    spans, page = [(0, 1000), (3000, 3001), (2047, 3333), (0, 5), (64, 192)], 16
    pages = torch.randperm(5 * 256).view(5, 256)
    cache = torch.randn(Hkv, 5 * 256 * page, 2, D).bfloat16()
    q = torch.randn(sum(end - start for start, end in spans), Hq, D).bfloat16()
    chunks, row = [], 0
    for owner, (start, end) in enumerate(spans):
        chunks.append((row, start, end, owner))
        row += end - start
    out = torch.full_like(q, torch.nan).cuda()
    tiles = prefill.tiles(chunks, Hq // Hkv)
    prefill.attend(*(t.cuda() for t in (q, cache, tiles, pages)), out, page_size=page, scale=D**-0.5)
    for row, start, end, owner in chunks:
        slots = (pages[owner, :, None] * page + torch.arange(page)).flatten()[:end]
        k, v = (x.cuda().double().repeat_interleave(Hq // Hkv, 0) for x in cache[:, slots].unbind(2))
        seen = torch.arange(end) <= torch.arange(start, end)[:, None]
        mine = slice(row, row + end - start)
        wanted = F.scaled_dot_product_attention(
            q[mine].cuda().double().transpose(0, 1), k, v, attn_mask=seen.cuda()
        ).transpose(0, 1)
        assert (out[mine] - wanted).abs().max() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 32])
def test_parts_add_up_on_a_gpu(rows: int):
    from turnout.kernels.common.split_gemm import parts

    torch.manual_seed(0)
    for M, K in ((5120, 2048), (2048, 4096), (128, 2048), (70, 768), (5120, 2880), (32, 2880)):
        x = torch.randn(rows, K, device="cuda").bfloat16()
        w = (torch.randn(M, K, device="cuda") * K**-0.5).bfloat16()
        bias = torch.randn(M, device="cuda").bfloat16() if K == 2880 else None
        found = parts(x, w, bias)
        assert found is not None
        error = (
            (
                found.sum(0).double()
                - F.linear(x.double(), w.double(), None if bias is None else bias.double())
            )
            .abs()
            .max()
        )
        assert error < 1e-4
    assert parts(torch.randn(33, 2048, device="cuda").bfloat16(), torch.randn(512, 2048).bfloat16()) is None
