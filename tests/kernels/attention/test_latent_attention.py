"""Latent attention in Triton's interpreter, against a softmax written out; and on a GPU, at real sizes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.kernels import interpreted
from tests.kernels.compiled import compiled, machine_code
from turnout.kernels.attention.latent_specialised import attend_latent_span_specialised


@pytest.fixture(scope="module")
def results() -> dict[str, bool]:
    return interpreted.results("attention/latent_in_interpreter.py")


CASES = [
    "short",
    "splits",
    "padding",
    "odd-heads",
    "many-heads",
    "ahead",
    "joined-in-parts",
    "deepseek",
    "heads-of-one-row",
    "heads-of-few-rows",
    "heads-of-more-rows",
    "heads-store-nothing",
    "heads-of-no-row",
    "no-rows",
    "steps",
    "sparse-steps",
    "prompts",
]


@pytest.mark.parametrize("case", CASES)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tiles",
    [
        {},
        {"heads": 32, "warps": 8},
        {"heads": 64, "warps": 8},
        {"heads": 64, "warps": 8, "tokens": 32, "stages": 4, "ahead": True, "narrow": True, "parts": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("H", [16, 20, 128])
def test_on_a_gpu(H: int, splits: int, tiles: dict[str, int]):
    from turnout.kernels.attention.latent import Tiles, attend

    torch.manual_seed(0)
    ends, page = torch.tensor([1, 0, 4000, 777, 16]), 16
    pages = torch.randperm(5 * 256).view(5, 256)
    q, cache = torch.randn(5, H, 576).bfloat16(), torch.randn(5 * 256 * page, 576).bfloat16()
    given = (t.cuda() for t in (q, cache, pages, ends))
    rest = {"latent_dim": 512, "page_size": page, "splits": splits, "scale": 576**-0.5}
    found = attend(*given, **rest, tiles=Tiles(**tiles)).cpu()
    for b, end in enumerate(ends.tolist()):
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[:end]
        kept = cache[slots].double()
        wanted = (q[b].double() @ kept.T * 576**-0.5).softmax(-1) @ kept[:, :512] if end else 0
        assert (found[b].double() - wanted).abs().max() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("H", [64, 128, 20, 80])
def test_specialised_on_a_gpu(H: int, splits: int, page: int):
    """Contexts of no, few and many tiles; what no row sees is NaN."""
    from turnout.kernels.attention.latent import SPECIALISED, attend

    torch.manual_seed(0)
    ends, B = [1, 0, 4000, 777, 16, 64, 128, 129, 4096], 9
    pages = torch.randperm(B * 4096 // page).view(B, -1)
    q, cache = torch.randn(B, H, 576).bfloat16(), torch.randn(B * 4096, 576).bfloat16()
    slots = (pages[..., None] * page + torch.arange(page)).flatten(1)
    seen = [cache[slots[b, :end]].double() for b, end in enumerate(ends)]
    for b, end in enumerate(ends):
        cache[slots[b, end:]] = torch.nan
    given = (t.cuda() for t in (q, cache, pages.int(), torch.tensor(ends).int()))
    rest = {"latent_dim": 512, "page_size": page, "splits": splits, "scale": 576**-0.5}
    found = attend(*given, **rest, tiles=SPECIALISED).cpu()
    for b, kept in enumerate(seen):
        wanted = (q[b].double() @ kept.T * 576**-0.5).softmax(-1) @ kept[:, :512] if len(kept) else 0
        assert (found[b].double() - wanted).abs().max() < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 2, 17, 63, 130, 256])
@pytest.mark.parametrize(("H", "nope", "value"), [(128, 128, 128), (16, 128, 128), (20, 192, 256)])
def test_products_by_head_on_a_gpu(H: int, nope: int, value: int, N: int):
    """One after the other, as kernels that begin early; what is stored is there for the next kernel."""
    from turnout.kernels.attention import latent_heads

    torch.manual_seed(0)
    up = (torch.randn(H, nope + value, 512, device="cuda") * 0.05).bfloat16()
    q, latent = torch.randn(N, H, nope + 64).bfloat16().cuda(), torch.randn(N, 576).bfloat16().cuda()
    cache, slots = torch.zeros(512, 576).bfloat16().cuda(), torch.randperm(512)[:N].cuda()
    wanted = torch.einsum("nhd,hdl->nhl", q[..., :nope].double(), up[:, :nope].double())
    wanted_values = torch.einsum("nhl,hvl->nhv", wanted.bfloat16().double(), up[:, nope:].double())
    for _ in range(3):
        cache.zero_()
        found = latent_heads.absorbed(q, up[:, :nope], (latent, slots, cache))
        few = slice(latent_heads.MOST_OF_VALUES)
        values = latent_heads.values(found[few, :, :512].contiguous(), up[:, nope:])
        assert torch.equal(cache[slots], latent)
        assert torch.equal(found[..., 512:], q[..., nope:])
        assert (found[..., :512].double() - wanted).abs().max() < 1e-2 * wanted.abs().max()
        assert (values.double() - wanted_values[few]).abs().max() < 1e-2 * wanted_values.abs().max()


@pytest.mark.parametrize("nope", [128, 192])
@pytest.mark.parametrize("rows", [16, 64])
def test_absorbing_compiles_as_designed(rows: int, nope: int, tmp_path: Path):
    from turnout.kernels.attention.latent_heads import HELD, absorb_heads
    from turnout.kernels.common.sizes import power_of_two

    depth = power_of_two(nope)
    constants = {
        "DN": nope, "DNP": depth, "DR": 64, "DRP": 64, "LC": 512, "CP": 1024, "ROWS": rows,
        "COLUMNS": HELD // depth, "PDL": True,
    }  # fmt: skip
    types = dict.fromkeys(("q_ptr", "weight_ptr", "latent_ptr", "cache_ptr", "out_ptr"), "*bf16")
    _check_products_by_head(compiled(
        absorb_heads, constants, warps=4, multiples=("head_stride", "H"), slots_ptr="*i64", **types
    ), tmp_path)  # fmt: skip


def test_values_of_heads_compile_as_designed(tmp_path: Path):
    from turnout.kernels.attention.latent_heads import MOST_OF_VALUES, values_of_heads

    constants = {"DV": 128, "LC": 512, "LCP": 512, "ROWS": MOST_OF_VALUES, "VALUES": 32, "PDL": True}
    types = dict.fromkeys(("mixed_ptr", "weight_ptr", "out_ptr"), "*bf16")
    done = compiled(values_of_heads, constants, warps=4, multiples=("head_stride", "H"), **types)
    _check_products_by_head(done, tmp_path)


def _check_products_by_head(done: Any, folder: Path) -> None:
    """By tensor cores, without spills, and with all weights asked for before the wait."""
    instructions, needs = machine_code(done, folder)
    assert re.search(r"HG?MMA", instructions)
    assert "STACK:0" in needs
    ahead = done.asm["ptx"].partition("griddepcontrol.wait")[0]
    assert len(re.findall(r"ld\.global\S*v4", ahead)) == 16  # of 16 bytes by 128 threads: HELD


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(128, 64, 128), (192, 64, 256)], ids=str)
def test_prompts_on_a_gpu(sizes: tuple[int, int, int]):
    """Chunks of one tile and of many, one behind a prefix, whose keys and values are made at once; tokens
    behind the last are NaN."""
    from turnout.attention.up_projection import UpProjection
    from turnout.kernels.attention import latent_prefill, prefill

    torch.manual_seed(0)
    (nope, rope, value), H = sizes, 5
    up = UpProjection((torch.randn(H, nope + value, 512, device="cuda") * 0.04).bfloat16(), nope)
    chunks = [(0, 0, 777, 0), (777, 1000, 1129, 777), (906, 0, 1, 1906)]  # as of `tiles`
    latent = torch.randn(2000, 512 + rope, device="cuda").bfloat16()
    latent[1907:] = torch.nan
    q, out = torch.randn(907, H, nope + rope, device="cuda").bfloat16(), torch.empty(907, H, value).bfloat16()
    out, parts = out.cuda(), latent_prefill.key_parts(nope, rope, value)
    tiling = latent_prefill.tiles_for(value, 2)
    tiles = prefill.tiles(chunks, tiling.rows).cuda()
    scale = (nope + rope) ** -0.5
    latent_prefill.attend(q, up.made(latent), latent, tiles, out, scale=scale, parts=parts, sizes=tiling)
    wide = UpProjection(up.weight_HXL.double(), nope)
    for row, start, end, begin in chunks:
        k, v = wide.expand(latent[begin : begin + end].double())
        scores = q[row : row + end - start].double().transpose(0, 1) @ k.transpose(1, 2) * scale
        seen = torch.ones(end, end, device="cuda").tril().bool()[start:]
        wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        assert (out[row : row + end - start].transpose(0, 1) - wanted).abs().max() < 3e-2


@pytest.mark.gpu
def test_index_scores_and_chosen_rows_on_a_gpu():
    """Of DeepSeek-V3.2's sizes, against the reference in torch."""
    from turnout.attention.indexing import Index, index_scores
    from turnout.kernels.attention.index import scores
    from turnout.kernels.attention.latent import attend

    torch.manual_seed(0)
    ends, page = torch.tensor([1, 0, 4000, 777]).cuda(), 16
    pages = torch.randperm(4 * 256).view(4, 256).cuda()
    slots = (pages[..., None] * page + torch.arange(page).cuda()).flatten(1)
    q, keys = torch.randn(4, 64, 128).cuda().bfloat16(), torch.randn(4 * 4096, 128).cuda().bfloat16()
    weights = torch.randn(4, 64).cuda() / 64
    found = scores(q, weights, keys, pages, ends, page_size=page)
    wanted = index_scores(Index(q, keys[:4], weights), keys[slots])
    seen = torch.arange(4096).cuda() < ends[:, None]
    assert torch.equal(found.isfinite(), seen)
    assert (found - wanted)[seen].abs().max() < 1e-2
    chosen = torch.stack([s[torch.randperm(4096)[:2048]] for s in slots]).int()
    counts = torch.tensor([2048, 0, 2048, 5]).cuda()
    kept, q = torch.randn(4 * 4096, 576).cuda().bfloat16(), torch.randn(4, 128, 576).cuda().bfloat16()
    rest = {"latent_dim": 512, "page_size": 1, "splits": 4, "scale": 576**-0.5}
    out = attend(q, kept, chosen, counts, **rest)
    for n, count in enumerate(counts.tolist()):
        read = kept[chosen[n, :count].long()].double()
        expected = (q[n].double() @ read.T * 576**-0.5).softmax(-1) @ read[:, :512] if count else 0
        assert (out[n].double() - expected).abs().max() < 2e-2


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


def test_specialised_kernel_compiles_as_designed(tmp_path: Path):
    constants = {"PAGE": 16, "STAGES": 2, "PDL": True}
    types = dict.fromkeys(("q_ptr", "cache_ptr", "partial_ptr"), "*bf16") | {"lse_ptr": "*fp32"}
    done = compiled(
        attend_latent_span_specialised,
        constants,
        warps=4,
        multiples=("H",),
        table_ptr="*i32",
        ends_ptr="*i32",
        **types,
    )
    products = Counter(re.findall(r"wgmma\.mma_async\S*m64n(\d+)k16", done.asm["ptx"]))
    assert products == {"64": 2 * 36, "256": 2 * 4}  # scores, of the first tile and of the next; two halves
    instructions, _ = machine_code(done, tmp_path)
    # What is begun together runs together. Had operands to wait, ptxas would let each product end first.
    assert len(re.findall(r"HGMMA.*gsb0", instructions)) == 2 * 3 + 2


@pytest.mark.parametrize(
    ("first", "more", "value"), [pytest.param(128, 0, 128, marks=pytest.mark.more), (128, 64, 256)]
)
def test_prompts_compile_as_designed(first: int, more: int, value: int, tmp_path: Path):
    """Loads by TMA, products on Hopper's tensor cores, and no register spills."""
    from turnout.kernels.attention.latent_prefill import attend_expanded_tiles, tiles_for

    sizes = tiles_for(value, 2)
    constants = {
        "FIRST": first,
        "MORE": more,
        "R": 64,
        "DV": value,
        "ROWS": sizes.rows,
        "TOKENS": sizes.tokens,
    }
    columns = {"made_desc": first, "more_desc": more or first, "rope_desc": 64, "value_desc": value}
    types = {name: f"tensordesc<bf16[{sizes.tokens}, {size}]>" for name, size in columns.items()}
    types |= {"q_ptr": "*bf16", "tiles_ptr": "*i64"}
    done = compiled(
        attend_expanded_tiles, constants, warps=sizes.warps, stages=sizes.stages, multiples=(), **types
    )
    assert "wgmma.mma_async" in done.asm["ptx"]
    assert "cp.async.bulk.tensor" in done.asm["ptx"]
    _, needed = machine_code(done, tmp_path)
    assert " STACK:0" in needed, needed


@pytest.mark.parametrize(
    ("rows", "dtype", "device", "taken"),
    [
        (16, torch.bfloat16, "cuda", True),
        (17, torch.bfloat16, "cuda", False),
        (1, torch.float32, "cuda", False),
        (1, torch.float32, "cpu", True),
    ],
)
def test_products_by_head_of_few_rows_of_16_bits(rows: int, dtype: torch.dtype, device: str, taken: bool):
    from turnout.kernels.attention.latent_heads import MOST_OF_VALUES, takes

    with FakeTensorMode():
        assert takes(torch.empty(rows, 4, 512, dtype=dtype, device=device), MOST_OF_VALUES) == taken
