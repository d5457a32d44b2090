"""Steps in chunks: how they are cut, and the layer between ranks whose buffers hold less than a step.

They are declared for dispatchers between GPUs; here "collective" declares them. Results that come back in FP8
are tried in the same run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.moe.build import MAX_TOKENS
from tests.moe.exchange import Case, Finding, run
from tests.ranks import Pools
from turnout.moe.capabilities.capability import DispatcherCapability
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.in_flight import in_chunks

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_as_few_chunks_as_fit_and_as_many_on_every_rank():
    tokens = [7, 0, 20]
    found = []
    for rank, own in enumerate(tokens):
        x_TH = torch.arange(own)[:, None]
        chunks = in_chunks(x_TH, x_TH + 100, x_TH + 200, tokens, rank, 8)
        for part in range(3):
            assert torch.equal(torch.cat([chunk[part] for chunk in chunks]), x_TH + 100 * part)
        assert [len(chunk[0]) for chunk in chunks] == [chunk[3][rank] for chunk in chunks]
        found.append([chunk[3] for chunk in chunks])
    assert found == [[(3, 0, 7), (2, 0, 7), (2, 0, 6)]] * 3


@pytest.mark.parametrize(("tokens", "most"), [([0, 0], 4), ([4, 1], 4), ([9, 50], 0)])
def test_what_fits_stays_whole(tokens: Sequence[int], most: int):
    x_TH = torch.zeros(tokens[1], 3)
    ((same_TH, _, _, same),) = in_chunks(x_TH, x_TH, x_TH, tokens, 1, most)
    assert same_TH is x_TH
    assert same == tokens


@dataclass(frozen=True, kw_only=True)
class Chunked(Case):
    def declared(self) -> Sequence[DispatcherCapability]:
        return [replace(d, in_chunks=True) for d in DISPATCHERS.values()]


CASES = (
    Chunked(dispatcher="collective", world=2, ep=2, dp=2, capacity=24),
    Chunked(dispatcher="collective-experts", world=2, ep=1, dp=1, capacity=23, back="fp8"),
    Case(dispatcher="collective", world=2, ep=2, dp=2, back="fp8", skewed=True),
    Case(dispatcher="collective", world=2, ep=2, dp=2, back="fp8", weights="mxfp4", wire="fp8"),
)


def test_the_layer_against_the_reference(ranks: Pools):
    found: list[Finding] = [f for own in ranks(2).run(run, CASES, timeout=100) for f in own]
    bad = [f for f in found if not f.good]
    assert not bad, "\n".join(map(str, bad[:5]))
    assert {f.case for f in found} == set(CASES)
    chunked = [f for f in found if f.case.capacity and f.phase == "prefill" and max(f.tokens) == MAX_TOKENS]
    assert chunked
    for finding in chunked:
        assert 0 < finding.rows <= finding.planned == finding.case.dp * finding.case.capacity
    in_fp8 = max(f.error for f in found if f.case.back == "fp8")
    assert 0.02 < in_fp8 < 0.03, "three bits behind the point, of each rank's part"


def test_costs_are_those_measured():
    """Within 15 % from 1024 tokens on, where it matters in how many chunks they go."""
    rows = json.loads((RESULTS / "a2a-nvlink-nvidia-h200-x2-2026-11-21.json").read_text())["rows"]
    compared = 0
    for row in rows:
        declared = DISPATCHERS.entries.get(row["dispatcher"])
        if declared is None or not row["format"] == row["combine_format"] == "bf16":
            continue
        assert declared.cost is not None
        us = declared.cost.us(row["wire_bytes"])
        if row["tokens"] >= 1024 or row["tokens"] == 1:
            assert us == pytest.approx(row["graph_us"], rel=0.15)
            compared += 1
    assert compared >= 6
