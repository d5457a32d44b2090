"""The measurement of latent attention of prompts, in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_kernel_and_torch_give_what_attention_in_float32_does(tmp_path: Path) -> None:
    output = tmp_path / "prompts.json"
    tiny = ["--device", "cpu", "--num-heads", "2", "--tokens", "40", "--output", str(output)]
    run = subprocess.run(
        [sys.executable, "-m", "tools.latent_prompts", *tiny], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    ours, torch_s = json.loads(output.read_text())["rows"]
    assert (ours["by"], torch_s["by"]) == ("triton", "torch")
    assert ours["error"] < 1e-4
    assert torch_s["error"] < 1e-4
