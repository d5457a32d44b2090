"""Pruning: what was once measured best is among what is left to time, or something as fast is."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from turnout.bench.moe import SHAPES
from turnout.moe.backends.hopper.cost_model import _tiles
from turnout.moe.backends.hopper.kernels import Packed, Plain, candidates, refuse, rule
from turnout.moe.backends.hopper.kernels.fp8_sorted import ONLY
from turnout.moe.backends.hopper.layer_shape import LayerShape
from turnout.moe.backends.hopper.tile_config import LayerTiles, TileConfig

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
MOST = 40  # timings for one batch size


def shape_named(name: str, format: str) -> LayerShape:
    shape = SHAPES[name]
    return LayerShape.of(shape.spec(format), num_local_experts=shape.experts // shape.ep, expert_tp=1)


def measured() -> dict[tuple[str, int, str], dict[TileConfig, float]]:
    """Times of GEMM1 by shape, tokens and format, from sweeps of when the kernels were written."""
    found: dict[tuple[str, int, str], dict[TileConfig, float]] = defaultdict(dict)

    def rows(name: str) -> list[dict]:
        return json.loads((RESULTS / f"{name}.json").read_text())["rows"]

    first = [row for row in rows("expert-gemm-nvidia-h200-2026-11-21") if row["kernel"] == "staged"]
    bf16 = [row for row in first if row["format"] == "bf16"]  # other kernels were written later
    for row in bf16 + [row for row in rows("expert-gemm-packed-nvidia-h200-2026-11-22") if "tiling" in row]:
        times = found[row["shape"], row["tokens"], row["format"]]
        rows, tokens, k_blocks, *others = map(int, row["tiling"].split(","))
        kernel = Plain if row["format"] == "bf16" else Packed
        config = kernel(rows, tokens, 64 * k_blocks, *others)
        times[config] = min(row["gemm1_us"], times.get(config, row["gemm1_us"]))
    return found


def test_what_is_kept_holds_what_was_measured_best_or_its_equal():
    compared = 0
    for (name, tokens, format), times in measured().items():
        shape = shape_named(name, format)
        times = {one: us for one, us in times.items() if not refuse(shape, LayerTiles(one, one))}
        kept = {config for choices in candidates(shape, tokens) for config in choices.first}
        assert min(us for config, us in times.items() if config in kept) <= 1.03 * min(times.values())
        compared += len(times) > 3
    assert compared >= 10


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 12, 40])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (8, 2), (4, 1), (6, 6)])
def test_tiles_are_expected_as_routes_drawn_at_random_fill_them(experts: int, top_k: int, tokens: int):
    """Where pairs are sorted; elsewhere each is a tile, as the rule has it."""
    shape = LayerShape(
        format="mxfp4", hidden=512, inner=512, w13_rows=1024, num_experts=experts, local_experts=experts // 2,
        top_k=top_k,
    )  # fmt: skip
    touched, tiles = _tiles(shape, tokens, 8)
    if shape.unsorted(tokens):
        assert touched == tiles == tokens * top_k / 2
        return
    draw = random.Random(tokens)
    drawn = []
    for _ in range(2000):
        counts = Counter(e for _ in range(tokens) for e in draw.sample(range(experts), top_k))
        drawn.append([-(-n // 8) for e, n in counts.items() if e < experts // 2])
    assert touched == pytest.approx(sum(map(len, drawn)) / 2000, rel=0.05)
    assert tiles == pytest.approx(sum(map(sum, drawn)) / 2000, rel=0.05)


@pytest.mark.parametrize("format", ["bf16", "fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", SHAPES)
def test_few_are_left_all_run_and_the_rule_is_among_them(name: str, format: str):
    shape = shape_named(name, format)
    for tokens in (1, 4, 16, 64, 256, 1024, 4096, 16384):
        found = candidates(shape, tokens)
        assert sum(len(choices.first) + len(choices.second) for choices in found) <= MOST
        pairs = [LayerTiles(one, two) for choices in found for one in choices.first for two in choices.second]
        assert not any(refuse(shape, tiles) for tiles in pairs)
        assert rule(shape, tokens) in pairs
        assert (LayerTiles(ONLY, ONLY) in pairs) <= (format == "fp8" and shape.hidden % 256 == 0)
