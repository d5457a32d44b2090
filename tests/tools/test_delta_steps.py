"""The measurement of steps of Gated DeltaNet, tiny, in Triton's interpreter: near a step in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_kernel_and_torch_are_measured_and_compared(tmp_path: Path) -> None:
    output = tmp_path / "steps.json"
    tiny = ["--device", "cpu", "--heads", "2", "4", "--head-dim", "16", "--requests", "1", "3"]
    command = [sys.executable, "-m", "tools.delta_steps", *tiny, "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [(row["peer"], row["requests"]) for row in rows] == [
        ("triton", 1), ("torch", 1), ("triton", 3), ("torch", 3),
    ]  # fmt: skip
    for row in rows:
        assert row["error"] < 1e-5, row
        assert row["state_error"] < 1e-6, row
        assert row["us"] > 0
        assert row["share"] > 0
