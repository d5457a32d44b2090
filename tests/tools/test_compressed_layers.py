"""What models take of the ways that tools/compressed_layers.py measured: those that took least."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tools.compressed_layers import CUTS, HIDDEN, KINDS
from turnout.engine.warmup import prompt_sizes
from turnout.kernels.attention import compressed
from turnout.kernels.common import streams

MEASURED = Path(__file__).parents[2] / "benchmarks/results/compressed-layers-nvidia-h200-2026-11-27.json"
WAYS = {compressed.PLAIN: "plain", compressed.SPECIALISED: "specialised"}


@pytest.fixture(scope="module")
def measured() -> dict[tuple[str, int], dict[str, float]]:
    """us, of each kernel and number of rows, by way."""
    found: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in json.loads(MEASURED.read_text())["rows"]:
        found[row["what"], row["rows"]][row["way"]] = row["us"]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_attention_has_the_tiles_that_took_less(kind: str, measured: dict[tuple[str, int], dict[str, float]]):
    cases = [(kind, rows, True) for rows in (1, 2, 4, 8, 32, 64, 128)] + [(f"prompt {kind}", 1024, False)]
    for what, rows, decoding in cases:
        took = measured[what, rows]
        chosen = took[WAYS[compressed.tiles_for(rows, decoding=decoding)]]
        assert chosen <= (1.04 if rows == 2 else 1.02) * min(took[way] for way in WAYS.values())


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_connections_are_cut_as_took_least(rows: int, measured: dict[tuple[str, int], dict[str, float]]):
    """One cut serves what adds one part and what adds two."""
    of_one, of_two = (measured[f"connection of {parts} parts", rows] for parts in (1, 2))
    took = {way: of_one[way] + of_two[way] for way in of_one}
    chosen = next(way for way, cut in CUTS.items() if cut == streams.cut_of(rows, HIDDEN))
    assert took[chosen] <= 1.01 * min(took.values())


def test_kernels_change_where_first_prompts_have_both():
    """Whatever the most tokens of a step are; blocks are no more than there are."""
    cuts = [streams.cut_of(rows, HIDDEN) for rows in range(1, 2049)]
    tiles = [compressed.tiles_for(rows, decoding=True) for rows in range(1, 2049)]
    for chosen in (cuts, tiles):
        assert len(set(chosen)) > 1
        for most in range(1, 2049):
            assert {chosen[size - 1] for size in prompt_sizes(most, 4)} == set(chosen[:most])
    assert streams.cut_of(40, 64).blocks == 1
