"""Attention and products by rows in Triton's interpreter, against torch's; and on a GPU, at real sizes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.kernels import interpreted
from tests.kernels.compiled import compiled, machine_code
from turnout.attention.capability import Chosen
from turnout.moe.backends.hopper.tile_config import SHARED_BYTES


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
        "wide",
        "wide-window-sinks",
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
        "projected",
        "projected-splits",
        "projected-heads",
        "projected-window-sinks",
        "projected-rows",
        "parts",
        "product",
        "product-odd",
    ],
)
def test_interpreted(results: dict[str, bool], case: str):
    assert results[case]


def decoded_first(of_batches: list[Any]) -> set[Any]:
    """What steps need that decode 1, 2, 4, ... requests and the most. of_batches: what 1, 2, 3, ... do."""
    return {x for B, x in enumerate(of_batches, 1) if B & (B - 1) == 0} | {of_batches[-1]}


@pytest.mark.parametrize("processors", [78, 108, 114, 132])
def test_first_prompts_decode_by_every_cut(processors: int):
    """As many tokens as powers of two, and the most, are decoded first (engine/warmup.py): no number of
    requests below has spans or tokens at a time of its own."""
    from turnout.kernels.attention.decode import cut_of

    for heads, size, window, context in product(
        range(1, 17), (64, 128, 256), (0, 128, 4096), (300, 1000, 2048, 40960)
    ):
        cuts = [cut_of(B, heads, size, 2, context, window, processors) for B in range(1, 301)]
        for most in (1, 7, 22, 25, 40, 64, 300):
            assert set(cuts[:most]) == decoded_first(cuts[:most]), (heads, size, window, context, most)


@pytest.mark.parametrize("processors", [78, 108, 114, 132])
def test_first_prompts_decode_by_every_program_that_turns_heads(processors: int):
    """As above."""
    from turnout.kernels.attention.decode import cut_of
    from turnout.kernels.attention.decode_heads import programs_of

    for heads, size, window, context in product(
        range(1, 17), (64, 128, 256), (0, 128, 4096), (300, 1000, 2048, 40960)
    ):
        sizes = heads, size, 2
        chosen = [
            programs_of(cut_of(B, *sizes, context, window, processors), B, *sizes, window, processors)
            for B in range(1, 301)
        ]
        for most in (1, 7, 22, 25, 40, 64, 300):
            assert set(chosen[:most]) == decoded_first(chosen[:most]), (heads, size, window, context, most)


RESULTS = Path(__file__).parents[3] / "benchmarks/results"
BLOCKS = RESULTS / "attention-decode-blocks-nvidia-h200-2026-11-27.json"
BEFORE = RESULTS / "attention-nvidia-h200-2026-11-26.json"  # all of them by 64 tokens
LOAD = ("requests", "kv_heads", "head_dim", "context", "window", "page_size", "sinks")


def test_contexts_are_read_by_as_many_tokens_as_took_less():
    """Of 64 tokens and 128. One request with sinks and without reads the same, yet took 2 us more or less."""
    from turnout.kernels.attention.decode import cut_of

    took: dict[tuple, dict[int, float]] = defaultdict(dict)
    for file, block in ((BEFORE, 64), (BLOCKS, 0)):
        for row in json.loads(file.read_text())["rows"]:
            if row["peer"] == "triton" and row["tokens"] == 1 and row["head_dim"] < 256:
                took[tuple(row[x] for x in LOAD)][block or row["decode_block"]] = row["us"]
    assert len(took) == 22
    for load, us in took.items():
        B, heads, size, _, window, *_ = load
        assert us.keys() >= {64, 128}
        cut = cut_of(B, heads, size, 2, 40960, window, 132)
        assert us[cut.block] <= 1.02 * min(us.values()) + (2 if B == 1 else 0), load


def test_contexts_are_cut_by_nothing_of_the_batch_where_results_may_not_depend_on_it():
    from turnout.attention.kinds import AttentionSpec, CacheGroup
    from turnout.attention.paged import paged_attention
    from turnout.attention.rows import cut_of

    spec = AttentionSpec.full(num_heads=8, num_kv_heads=4, head_dim=128)
    sizes = {"num_pages": 4096, "page_size": 16, "max_running": 64, "max_context": 8192}
    chosen = Chosen(backend="triton", prompts="triton")
    cuts = []
    for fixed in (0, 8):
        paged = paged_attention(
            CacheGroup(layers=(0,), spec=spec, sharing=()), **sizes, device=torch.device("cpu"),
            dtype=torch.bfloat16, fixed_spans=fixed, chosen=chosen,
        )  # fmt: skip
        paged.processors = 132
        cuts.append({cut_of(paged, rows) for rows in range(1, 65)})
    assert {cut.block for cut in cuts[0]} == {64, 128}
    assert cuts[1] == {(8, 64)}


def registers_of(used: str) -> int:
    """That a thread takes."""
    found = re.search(r"REG:(\d+)", used)
    assert found
    return -(-int(found[1]) // 8) * 8


@pytest.mark.parametrize(("size", "block"), [(64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize(("one", "window"), [(True, 128), (False, 0)])
def test_it_compiles_for_hopper_and_spills_nothing(
    size: int, block: int, one: bool, window: int, tmp_path: Path
):
    """A multiprocessor holds as many programs as `cut_of` counts on: four, and two of 128 values by 128
    tokens."""
    from turnout.kernels.attention.decode import attend_span

    constants = {
        "G": 8, "GP": 16, "D": size, "DP": size, "PAGE": 16, "TOKENS": block, "WINDOW": window, "ONE": one,
        "SINKS": one, "PDL": True,
    }  # fmt: skip
    types = {"q_ptr": "*bf16", "cache_ptr": "*bf16", "table_ptr": "*i64", "ends_ptr": "*i64"}
    types |= {"out_ptr": "*bf16", "partial_ptr": "*bf16" if one else "*fp32"}
    done = compiled(attend_span, constants, warps=4, multiples=("head_stride",), **types)
    _, used = machine_code(done, tmp_path)
    assert "STACK:0 " in used
    held = 2 if size * block == 128 * 128 else 4
    assert held * 128 * registers_of(used) <= 65536
    assert held * done.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize(
    ("size", "batch", "held"),
    [(64, 16, 1), (128, 1, 1), (128, 8, 2), (128, 16, 2), (128, 100, 4), (256, 16, 1)],
)
@pytest.mark.parametrize("one", [True, False])
def test_heads_are_turned_in_registers_while_keys_are_on_their_way(
    size: int, batch: int, held: int, one: bool, tmp_path: Path
):
    """Of the projection nothing is read before it has ended, and no loaded value needs the stack. `held`
    programs fit on a multiprocessor."""
    from turnout.kernels.attention.decode import cut_of
    from turnout.kernels.attention.decode_heads import attend_heads, programs_of

    programs = programs_of(cut_of(batch, 4, size, 2, 4096, 0, 132), batch, 4, size, 2, 0, 132)
    assert programs
    block, warps = programs.cut.block, programs.warps
    constants = {
        "G": 8, "GQ": 8, "GP": 16, "D": size, "DP": size, "PAGE": 16, "TOKENS": block, "WINDOW": 0,
        "ONE": one, "SINKS": one, "NORM": True, "PARTS": 4, "PDL": True,
    }  # fmt: skip
    types = dict.fromkeys(("weight_ptr", "cos_ptr", "sin_ptr", "cache_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("slots_ptr", "table_ptr", "ends_ptr"), "*i64")
    types["partial_ptr"] = "*bf16" if one else "*fp32"
    done = compiled(
        attend_heads, constants, warps=warps, stages=programs.stages, most_registers=programs.registers,
        multiples=("head_stride", "row_stride"), **types,
    )  # fmt: skip
    _, used = machine_code(done, tmp_path)
    assert "STACK:0 " in used
    assert held * warps * 32 * registers_of(used) <= 65536
    assert held * done.metadata.shared <= SHARED_BYTES
    early, _, late = done.asm["ptx"].partition("griddepcontrol.wait")
    tile = 2 * block * size // (warps * 32 * 8)  # keys and values, 16 bytes at a time
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", early)) >= tile
    assert "griddepcontrol.launch_dependents" in early
    assert not re.search(r"st\.global", early)
    assert re.search(r"ld\.global\S*\.v2\.b32|ld\.global\S*\.v4\.b32", late)


@pytest.mark.parametrize(("group", "page"), [(8, 16), (1, 1), (16, 128), (5, 4)])
def test_prompts_by_specialised_warps_compile_for_hopper(group: int, page: int, tmp_path: Path):
    """Products wait for one another only where the kernel says so: ptxas would add waits for each product if
    it had to move their sums. Nothing needs the stack."""
    from turnout.kernels.attention import prefill_specialised

    constants = {
        "G": group, "GP": 1 << (group - 1).bit_length(), "PAGE": page, "BLOCK": prefill_specialised.BLOCK,
        "STAGES": prefill_specialised.STAGES,
    }  # fmt: skip
    types = dict.fromkeys(("q_ptr", "cache_ptr", "out_ptr"), "*bf16") | {"table_ptr": "*i64"}
    kernel = prefill_specialised.attend_tiles_specialised
    done = compiled(kernel, constants, warps=4, multiples=("head_stride",), tiles_ptr="*i64", **types)
    code, used = machine_code(done, tmp_path)
    assert "STACK:0 " in used
    assert code.count("HGMMA") == 64
    assert code.count("WARPGROUP.DEPBAR") == 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize(("D", "block"), [(128, 64), (128, 128), (64, 64), (64, 128)])
def test_on_a_gpu(dtype: torch.dtype, splits: int, D: int, block: int):
    from turnout.kernels.attention.decode import Cut, attend

    if dtype == torch.float32 and block == 128:
        pytest.skip("no model computes so")
    torch.manual_seed(0)
    ends, Hq, Hkv, page = torch.tensor([1, 0, 4000, 777, 16]), 32, 4, 16
    pages = torch.randperm(5 * 256).view(5, 256)
    q = torch.randn(5, Hq, D).to(dtype)
    cache = torch.randn(Hkv, 5 * 256 * page, 2, D).to(dtype)
    given = (t.cuda() for t in (q, cache, pages, ends))
    found = attend(*given, page_size=page, cut=Cut(splits, block), scale=D**-0.5).cpu()
    for b, end in enumerate(ends.tolist()):
        slots = (pages[b, :, None] * page + torch.arange(page)).flatten()[:end]
        k, v = (x.double().repeat_interleave(Hq // Hkv, 0) for x in cache[:, slots].unbind(2))
        wanted = F.scaled_dot_product_attention(q[b, :, None].double(), k, v)[:, 0] if end else 0
        error = (found[b].double() - wanted).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "programs", [(1, 64, 8, 3), (8, 64, 8, 3), (16, 128, 8, 3), (2, 64, 8, 5), (1, 64, 4, 3)]
)
@pytest.mark.parametrize(("Hq", "Hkv", "D", "parts"), [(32, 4, 128, 4), (16, 16, 64, 1), (12, 2, 96, 2)])
def test_heads_are_rotated_where_they_attend_on_a_gpu(
    Hq: int, Hkv: int, D: int, parts: int, programs: tuple[int, int, int, int]
):
    """Next to rotation with a store and attention in launches of their own; behind a product of 100 us."""
    from turnout.kernels.attention import decode, decode_heads
    from turnout.kernels.common.rows import rotate

    torch.manual_seed(0)
    ends, page = torch.tensor([1, 0, 4000, 777, 16, 65]), 16
    B = len(ends)
    pages = torch.randperm(B * 256).view(B, 256)
    slots = (pages[:, :, None] * page + torch.arange(page)).flatten(1)[torch.arange(B), ends - 1].cuda()
    cache = torch.randn(Hkv, B * 256 * page, 2, D).bfloat16().cuda()
    cache[:, slots] = torch.nan
    x = torch.randn(parts, B, (Hq + 2 * Hkv) * D).cuda()
    angles = torch.randn(B, D // 2)
    cos = angles.cos().repeat(1, 2).bfloat16().cuda()
    sin = torch.cat((-angles.sin(), angles.sin()), 1).bfloat16().cuda()
    weight = torch.rand(Hq + Hkv, D).bfloat16().cuda()
    splits, block, warps, stages = programs
    chosen = decode_heads.Programs(decode.Cut(splits, block), warps, stages, 128 if warps == 4 else None)
    rest = {"page_size": page, "scale": D**-0.5}
    pages, ends, large = pages.cuda(), ends.cuda(), torch.randn(4096, 4096).bfloat16().cuda()
    wanted_cache, given = cache.clone(), torch.full_like(x, torch.nan)
    q, _ = rotate(x, Hq, Hkv, cos, sin, weight, 1e-6, store=(wanted_cache, slots))
    wanted = decode.attend(q, wanted_cache, pages, ends, cut=decode.Cut(splits, 64), **rest)
    large @ large
    given.copy_(x)
    projected = given, Hq, Hkv, cos, sin, weight, 1e-6
    found = decode_heads.attend(*projected, cache, slots, pages, ends, programs=chosen, **rest)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-2)
    held = ends > 0
    kept, wanted_kept = cache[:, slots[held]], wanted_cache[:, slots[held]]
    torch.testing.assert_close(kept[:, :, 0], wanted_kept[:, :, 0], rtol=1e-2, atol=1e-2)
    assert torch.equal(kept[:, :, 1], wanted_kept[:, :, 1])
    cache[:, slots] = wanted_cache[:, slots] = 0
    assert torch.equal(cache, wanted_cache)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("Hq", "Hkv", "D", "page", "specialised"),
    [
        (32, 4, 128, 16, False), (16, 16, 64, 16, False), (12, 2, 96, 16, False), (32, 4, 128, 16, True),
        (12, 2, 128, 1, True), (8, 8, 128, 4, True), (16, 1, 128, 128, True), (10, 2, 128, 16, True),
    ],
)  # fmt: skip
def test_prompts_on_a_gpu(Hq: int, Hkv: int, D: int, page: int, specialised: bool):
    """Whole prompts, one token, and chunks behind a long context, against attention in float64. What no row
    sees is NaN."""
    from turnout.kernels.attention import prefill, prefill_specialised

    torch.manual_seed(0)
    spans, each = [(0, 1000), (3000, 3001), (2047, 3333), (0, 5), (64, 192)], 4096 // page
    pages = torch.randperm(5 * each).view(5, each)
    cache = torch.full((Hkv, 5 * 4096, 2, D), torch.nan).bfloat16()
    for row, (_, end) in zip(pages, spans, strict=True):
        slots = (row[:, None] * page + torch.arange(page)).flatten()[:end]
        cache[:, slots] = torch.randn(Hkv, end, 2, D).bfloat16()
    q = torch.randn(sum(end - start for start, end in spans), Hq, D).bfloat16()
    chunks, row = [], 0
    for owner, (start, end) in enumerate(spans):
        chunks.append((row, start, end, owner))
        row += end - start
    out = torch.full_like(q, torch.nan).cuda()
    queries = prefill_specialised.QUERIES if specialised else prefill.QUERIES
    tiles = prefill.tiles(chunks, prefill.tile_tokens(Hq // Hkv, queries))
    given, some = (t.cuda() for t in (q, cache, tiles, pages)), {"page_size": page, "scale": D**-0.5}
    if specialised:
        prefill_specialised.attend(*given, out, processors=7, **some)  # tile after tile
    else:
        prefill.attend(*given, out, **some)
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
