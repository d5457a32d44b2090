"""What tools.serving measures was not seen before: with a prefix cache, a repeated prompt costs next to
nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import serving
from turnout.bench.serve import ServeBench, measure


def test_no_measured_prompt_is_in_the_prefix_cache(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "serve.json"
    command = ["serving", "tiny", "--base-url", base_url, "--concurrency", "1", "3", "--input-len", "64"]
    monkeypatch.setattr(sys, "argv", [*command, "--output-len", "3", "--output", str(out)])
    serving.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["max_concurrency"] for row in rows] == [1, 3]
    assert [row["cached_prompt_tokens"] for row in rows] == [0, 0]
    assert [row["gpu_busy"] for row in rows] == [None, None]
    again = measure(
        ServeBench(input_len=64, output_len=3, num_prompts=4, max_concurrency=1, seed=0), base_url
    )
    assert again["cached_prompt_tokens"] > 0  # the server does cache: these prompts were the first load's


def test_utilization_is_of_the_load_and_of_all_gpus():
    before = "0, 0\n1, 0\n" * serving.COUNTED_FROM
    assert serving.mean_utilization(before + "0, 100\n1, 50\n0, 90\n1, 40\n1, 4") == pytest.approx(2.84 / 5)
    assert serving.mean_utilization("0, 100\n0, 100\n") is None
    assert serving.mean_utilization(before + "0, [N/A]\n1, [N/A]\n") is None
