"""The measurement of latent attention: all tiles, in Triton's interpreter, and which it says to choose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.latent_attention import choices


def test_tiles_are_chosen_over_all_contexts_and_wrong_ones_never() -> None:
    from turnout.kernels.attention.latent import Tiles

    wide, deep, wrong = Tiles(heads=64), Tiles(stages=4), Tiles(tokens=32)

    def row(requests: int, context: int, tiles: Tiles, us: float | None) -> dict:
        timed = {} if us is None else {"us": us}
        shape = {"requests": requests, "num_heads": 128, "context": context}
        return shape | {"tiles": tiles._asdict(), **timed}

    rows = [
        *(row(1, 4096, *case) for case in ((wide, 10.0), (deep, 11.0), (wrong, None))),
        *(row(1, 32768, *case) for case in ((wide, 40.0), (deep, 20.0), (wrong, 1.0))),
        *(row(32, 4096, *case) for case in ((wide, 10.0), (deep, 11.0))),
    ]
    assert choices(rows) == [(128, 1, deep), (128, 1 << 30, wide)]


def test_what_is_chosen_next_to_the_whole(tmp_path: Path) -> None:
    """In the tiles that are chosen; each attends to some of its context, as attention in float32 does."""
    output = tmp_path / "latent.json"
    tiny = ["--device", "cpu", "--requests", "2", "--num-heads", "4", "--context", "40", "--chosen", "24"]
    command = [sys.executable, "-m", "tools.latent_attention", *tiny, "--known", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    whole, chosen = json.loads(output.read_text())["rows"]
    assert (whole["chosen"], chosen["chosen"]) == (0, 24)
    assert whole["error"] < 1e-5
    assert chosen["error"] < 1e-5
    gain = whole["us"] / chosen["us"]
    assert (
        f"24 of 40 tokens, 4 heads, 2 requests: {chosen['us']:.1f} us, {gain:.2f} times as fast" in run.stdout
    )


@pytest.mark.more
def test_all_tiles_give_the_same_as_attention_in_float32(tmp_path: Path) -> None:
    output = tmp_path / "latent.json"
    tiny = ["--device", "cpu", "--requests", "1", "--num-heads", "17", "--context", "40"]
    command = [sys.executable, "-m", "tools.latent_attention", *tiny, "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = json.loads(output.read_text())["rows"]
    assert {row["tiles"]["heads"] for row in rows} == {16, 32, 64}
    assert all(row["error"] < 1e-5 and row["us"] > 0 for row in rows), rows


def test_the_library_is_refused_pages_that_it_does_not_read():
    command = [sys.executable, "-m", "tools.latent_attention", "--device", "cpu", "--flash-mla", "none.so"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "--flash-mla reads pages of 64 tokens: give --page-size too" in run.stderr
