"""Gated DeltaNet over prompts as it is measured, tiny, in Triton's interpreter: near a float64 recurrence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tests.kernels.attention.delta_rule_cases import drawn_cell
from tools.delta_prompts import FLA, Bench, Case
from turnout.attention.delta_rule import step


@pytest.mark.more
def test_the_kernels_and_torch_give_what_the_recurrence_does(tmp_path: Path) -> None:
    output = tmp_path / "prompts.json"
    tiny = ["--device", "cpu", "--heads", "2", "4", "--head-dim", "16", "--tokens", "70"]
    command = [sys.executable, "-m", "tools.delta_prompts", *tiny, "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    content = json.loads(output.read_text())
    rows = {row["peer"]: row for row in content["rows"]}
    assert list(rows) == ["triton", "fla-core", "torch"]
    for peer in ("triton", "torch"):
        assert rows[peer]["error"] < 1e-5, peer
        assert rows[peer]["state_error"] < 1e-5, peer
        assert rows[peer]["us"] > 0
    assert rows["fla-core"]["error_message"] == (FLA.lacking() or "runs on GPUs")
    assert "fla-core" in content["versions"]


def test_the_recurrence_is_that_of_single_steps() -> None:
    bench = Bench(Case("", 2, 4, requests=3, tokens=9, head_dim=16), torch.device("cpu"), torch.float32)
    draw = torch.Generator().manual_seed(1)
    bench.cell = drawn_cell(draw, (2, 4), (16, 16), 4, torch.float32)
    outputs, states = bench.reference()
    windows, mine = torch.zeros(3, 3, bench.cell.spec.channels), torch.zeros(3, 4, 16, 16)
    for t in range(9):
        y_BY = step(bench.cell, bench.mixed_BTX[:, t], windows, mine)
        assert_close(y_BY.double(), outputs[:, t], rtol=1e-4, atol=1e-5)
    assert_close(mine.double(), states, rtol=1e-4, atol=1e-5)
