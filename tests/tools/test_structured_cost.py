"""Both of the loads that tools.structured_cost compares are as long, and one of them follows its schema."""

from __future__ import annotations

import httpx
import pytest

from tools import structured_cost
from turnout.bench.serve import ServeBench
from turnout.errors import UserError


@pytest.mark.more
def test_loads_with_a_schema_and_without_are_measured_in_turns(
    base_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(structured_cost, "CONCURRENCY", 3)
    monkeypatch.setattr(structured_cost, "OUTPUT_LEN", 4)
    first, token = structured_cost.rows(base_url, 2, 1)
    assert (len(first["plain"]), len(first["structured"]), len(token["plain"])) == (2, 2, 1)
    assert first["more_ms"] == pytest.approx(
        sum(b - a for a, b in zip(first["plain"], first["structured"], strict=True)) / 2
    )
    assert token["ratio"] == pytest.approx(token["structured"][0] / token["plain"][0])
    load = structured_cost.structured(ServeBench(seed=7), 7)
    reply = httpx.post(
        f"{base_url}/completions", json={"prompt": "a", "max_tokens": 40, **load.extra}, timeout=60
    )
    assert reply.json()["choices"][0]["text"].startswith("[")
    assert not load.ignore_eos


def test_loads_of_different_length_are_not_compared(base_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(structured_cost, "schema", lambda seed: {"enum": [seed]})
    bench = ServeBench(input_len=4, output_len=30, num_prompts=1, max_concurrency=1)
    with pytest.raises(UserError, match="ended early"):
        structured_cost.pairs(base_url, bench, 1, "median_ttft_ms", 0)
