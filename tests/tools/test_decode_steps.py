"""The tool measures an engine that runs: each load gets its row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest

from tests.models.test_families_describe import PUBLISHED
from tests.serving import tiny_config
from tools import decode_steps, random_checkpoint
from turnout.server.launch import ServerProcess


def test_each_load_has_a_row(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flags = ["--device", "cpu", "--requests", "1", "3", "--eager", "--prefill", "64x2"]
    file = tmp_path / "steps.json"
    monkeypatch.setattr(sys, "argv", ["decode_steps", str(tiny_folder), *flags, "--output", str(file)])
    monkeypatch.setenv("TURNOUT_CONTEXT_LENGTH", "256")
    decode_steps.main()
    loaded, *rows = json.loads(file.read_text())["rows"]
    assert loaded["layers"] == 2
    assert [row["requests"] for row in rows] == [1, 3, 2]
    assert all(row["step_ms"] > 0 for row in rows[:2])
    read = [row["floor_share"] * row["step_ms"] * decode_steps.BYTES_PER_S / 1e3 for row in rows[:2]]
    assert 0 < read[0] < read[1] < 1.5 * loaded["planned_bytes"]
    assert rows[2]["tokens_per_s"] > 0


@pytest.mark.more
def test_random_gpt_oss_is_measured_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of the published configuration with tiny layers, as tools.random_checkpoint writes it from there."""
    folder, file = tmp_path / "gpt-oss", tmp_path / "steps.json"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "num_local_experts": 8}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "eos_token_id": 511}
    tiny = [word for name, value in sizes.items() for word in ("--set", name, str(value))]
    flags = [str(folder), "--config", str(PUBLISHED / "gpt-oss-120b.json"), "--num-layers", "4", *tiny]
    monkeypatch.setattr(sys, "argv", ["random_checkpoint", *flags, "--set", "pad_token_id", "null"])
    random_checkpoint.main()
    flags = ["--device", "cpu", "--requests", "1", "--eager", "--prefill", "64x1", "--output", str(file)]
    monkeypatch.setattr(sys, "argv", ["decode_steps", str(folder), *flags])
    monkeypatch.setenv("TURNOUT_CONTEXT_LENGTH", "256")
    decode_steps.main()
    loaded, *rows = json.loads(file.read_text())["rows"]
    assert loaded["layers"] == 4
    assert [row["requests"] for row in rows] == [1, 1]
    server = ServerProcess(tiny_config(folder), show=False)
    try:
        asked = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{server.wait_ready()}/completions", json=asked, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 8
    finally:
        assert server.stop() == 0, server.last_lines()
