"""Load parts of checkpoints and print, for each, the bytes kept and how far this process grew meanwhile.

    python -m tests.checkpoint.measure_loading '[[folder, first, count], ...]' '{"num_experts": ...}'

A process of its own: what a test runner has allocated before would hide the growth.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from pathlib import Path

import torch

from turnout.checkpoint import ExpertShape, open_checkpoint

LAYERS, VOCABULARY = 2, 16_000


def load(folder: Path, shape: ExpertShape, first: int, count: int) -> tuple[int, int]:
    with open_checkpoint(folder) as checkpoint:
        before = start_measuring()
        embedding = checkpoint.linear("model.embed_tokens", (VOCABULARY, shape.hidden), torch.bfloat16)
        layers = [
            checkpoint.experts(f"model.layers.{i}.mlp.experts", shape, first=first, count=count)
            for i in range(LAYERS)
        ]
        return sum(kept.nbytes for kept in [embedding, *layers]), peak() - before


def start_measuring() -> int:
    """Forget the peak so far (proc(5), clear_refs 5); returns the bytes resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    cases, shape = json.loads(sys.argv[1]), ExpertShape(**json.loads(sys.argv[2]))
    load(Path(cases[0][0]), shape, 0, 1)  # what is imported and allocated once is not weights
    print(json.dumps([load(Path(folder), shape, first, count) for folder, first, count in cases]))
