"""The tool measures an engine that runs: each load gets its row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tools import decode_steps


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


def test_busy_counts_overlapping_kernels_once():
    assert decode_steps._busy([]) == 0
    assert decode_steps._busy([(6.0, 8.0), (0.0, 2.0), (1.0, 4.0), (3.0, 3.5), (8.0, 10.0)]) == 0.8
