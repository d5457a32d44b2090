"""The measurement of attention, tiny, in Triton's interpreter: near the reference in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.more
def test_ours_and_sdpa_are_measured_and_compared(tmp_path: Path) -> None:
    output = tmp_path / "attention.json"
    tiny = ["--device", "cpu", "--attention-tp", "8", "--requests", "2", "--tokens", "24"]
    ways = ["--decode-blocks", "64", "128", "--max-context", "4096"]
    flags = [*tiny, *ways, "--shapes", "window", "256", "--output", str(output)]
    command = [sys.executable, "-m", "tools.attention", *flags]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    content = json.loads(output.read_text())
    rows = content["rows"]
    assert content["benchmark"] == "attention"
    assert {row["peer"] for row in rows} == {"triton", "flash-attn-4", "sdpa"}
    for row in rows:
        sdpa_can = not row["sinks"] and not row["window"]
        measured = row["peer"] == "triton" or (row["peer"] == "sdpa" and sdpa_can)
        assert ("error_message" in row) != measured, row
        if measured:
            assert row["error"] < 1e-5, row
            assert row["us"] > 0
            assert ("kv_tb_per_s" in row) == (row["tokens"] == 1)
    decoded = [row for row in rows if row["peer"] == "triton" and row["tokens"] == 1]
    assert {row["decode_block"] for row in decoded} == {64, 128}
    assert all(row["splits"] == (2 if row["requests"] == 1 and not row["window"] else 1) for row in decoded)
    assert {(row["requests"], row["tokens"]) for row in rows} == {(1, 24), (2, 24), (1, 12), (1, 1), (2, 1)}
    assert {row["head_dim"] for row in rows} == {64, 256}
    assert any(row["window"] and row["sinks"] for row in rows)
