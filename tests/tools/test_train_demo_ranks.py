"""Several ranks of a training compute the gradients of their batches together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SHARES = """
import torch
from tools.demo.ranks import Ranks

ranks = Ranks.joined("cpu")
torch.manual_seed(0)
model, x = torch.nn.Linear(3, 5), torch.randn(4, 3)
model(x).square().mean().backward()
whole = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(x.chunk(2)[ranks.rank]).square().mean().backward()
ranks.share_gradients(model.parameters())
torch.testing.assert_close([p.grad for p in model.parameters()], whole)
assert ranks.size == 2
assert ranks.mean(torch.tensor([ranks.rank, 4.0])).tolist() == [0.5, 4.0]
assert ranks.largest(torch.tensor([ranks.rank, -ranks.rank])).tolist() == [1, 0]
assert ranks.first(0.1 + ranks.rank) == 0.1
ranks.leave()
"""


def run(*words: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [*TORCHRUN, *words], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.more
def test_gradients_of_ranks_are_those_of_the_whole_batch(tmp_path: Path):
    (tmp_path / "shares.py").write_text(SHARES)
    run(str(tmp_path / "shares.py"))


@pytest.mark.more
def test_two_ranks_train(tmp_path: Path):
    words = ["-m", "tools.train_demo", "train", "--device", "cpu", "--architecture", "deepseek_v4"]
    sizes = ["--layers", "2", "--experts", "4", "--tokens", "1024", "--workers", "0", "--log-every", "1"]
    out = run(*words, *sizes, "--minutes", "0.05", "--quantized-share", "0", "--out", str(tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "training.json").read_text())
    assert record["ranks"] == 2
    assert record["progress"] == 1
    assert record["steps"] >= 1
    logged = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [row["step"] for row in logged] == list(range(1, record["steps"] + 1))  # told by one of them
    parts = [load_file(file) for file in (tmp_path / "run").glob("parameters-*.safetensors")]
    assert all(tensor.isfinite().all() for part in parts for tensor in part.values())
