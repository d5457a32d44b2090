"""Attention and products by rows in Triton's interpreter, against torch's; and on a GPU, at real sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import interpreted
from tests.kernels.compiled import compiled, machine_code


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
        "whole",
        "whole-splits",
        "whole-heads",
        "whole-plain",
        "whole-window-sinks",
        "whole-steps",
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


@pytest.mark.parametrize(
    ("parts", "one", "window", "sinks", "D", "most"),
    [(8, False, 0, False, 128, 168), (1, True, 0, False, 128, 128), (8, False, 128, True, 64, 128)],
)
def test_a_step_in_one_launch_compiles_for_hopper(
    parts: int, one: bool, window: int, sinks: bool, D: int, most: int, tmp_path: Path
):
    """Three or four programs' registers fit on a multiprocessor, and none is kept in memory."""
    from turnout.kernels.attention.decode_whole import rotate_store_attend

    constants = {
        "G": 8, "GP": 16, "GJ": 8, "D": D, "DP": D, "PAGE": 16, "TOKENS": 64, "WINDOW": window, "NORM": True,
        "PARTS": parts, "ONE": one, "MOST": 64, "CHUNK": 4096 // (8 * D), "SINKS": sinks, "FETCH": True,
        "PDL": True,
    }  # fmt: skip
    halves = ("weight_ptr", "cos_ptr", "sin_ptr", "cache_ptr", "out_ptr")
    types = dict.fromkeys(halves, "*bf16") | dict.fromkeys(("slots_ptr", "table_ptr", "ends_ptr"), "*i64")
    types |= {"heads_ptr": "*fp32" if parts > 1 else "*bf16", "done_ptr": "*i32"}
    multiples = ("row_stride", "part_stride", "head_stride")
    done = compiled(
        rotate_store_attend, constants, warps=4, multiples=multiples, most_registers=most, **types
    )
    assert "prefetch.global.L2" in done.asm["ptx"].partition("griddepcontrol.wait")[2]
    _, used = machine_code(done, tmp_path)
    assert "STACK:0 " in used


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
@pytest.mark.parametrize("splits", [1, 4, 64])
@pytest.mark.parametrize(
    ("heads", "window", "sinks", "parts"),
    [
        ((32, 4, 128), 0, False, 8),
        ((64, 8, 64), 128, True, 4),
        ((16, 1, 128), 0, False, 1),
        ((12, 2, 96), 0, True, 2),
    ],
)
def test_a_step_in_one_launch_on_a_gpu(
    heads: tuple[int, int, int], window: int, sinks: bool, parts: int, splits: int
):
    """Again and again, in a graph: as the launches that it replaces, whichever program comes last."""
    from turnout.kernels.attention.decode import attend
    from turnout.kernels.attention.decode_whole import attend_whole
    from turnout.kernels.common.rows import rotate

    torch.manual_seed(0)
    (Hq, Hkv, D), page, like = heads, 16, {"device": "cuda", "dtype": torch.bfloat16}
    ends = torch.tensor([1, 0, 4000, 777, 64, 65, 2048, 3])
    B, P = len(ends), 256
    pages = torch.randperm(B * P).view(B, P)
    places = (ends - 1).clamp(min=0)
    slots = pages.gather(1, places[:, None] // page)[:, 0] * page + places % page
    slots[ends == 0] = B * P * page
    cache = torch.randn(Hkv, (B * P + 1) * page, 2, D, **like)
    given = torch.randn(parts, B, (Hq + 2 * Hkv) * D, device="cuda") / parts**0.5
    angles = torch.randn(B, D // 2, device="cuda")
    cos, sin = angles.cos().repeat(1, 2).bfloat16(), torch.cat((-angles.sin(), angles.sin()), 1).bfloat16()
    weight, sink = torch.randn(Hq + Hkv, D, **like), torch.randn(Hq, device="cuda") if sinks else None
    pages, slots, ends = pages.cuda(), slots.cuda(), ends.cuda()
    rest = {"page_size": page, "splits": splits, "scale": D**-0.5, "window": window, "sinks_H": sink}
    before = cache.clone()
    q, _ = rotate(given, Hq, Hkv, cos, sin, weight, 1e-6, store=(before, slots))
    wanted = attend(q, before, pages, ends, **rest)
    done = torch.zeros(B * Hkv, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        args = given, cos, sin, weight, 1e-6, slots, cache, pages, ends, done
        return attend_whole(*args, num_q=Hq, **rest)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for _ in range(100):
        found.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    assert not done.any()
    held = slots[ends > 0]
    torch.testing.assert_close(cache[:, held], before[:, held], rtol=1e-2, atol=1e-2)


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
