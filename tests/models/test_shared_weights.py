"""Weights that one rank prepared and another maps: the same results, and nothing shared that changes."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models.families import FAMILIES, build
from tests.models.running import PlainAttention, count_reads, load
from turnout.models.shared_weights import SharedWeights
from turnout.parallel.groups import SINGLE_RANK

FEW = ("deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next")  # between them, every kind of part
IDS = [5, 77, 9, 300, 12]


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def view(memory: int, stamp: str = "a") -> SharedWeights:
    return SharedWeights(memory, stamp, SINGLE_RANK)


@pytest.mark.parametrize(
    "family", [name if name in FEW else pytest.param(name, marks=pytest.mark.more) for name in FAMILIES]
)
def test_a_mapped_model_computes_what_the_one_that_was_read_does(
    family: str, memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = build(tmp_path, FAMILIES[family]).folder
    read = load(folder)
    prepared = load(folder, shared=(first := view(memory)))
    assert first.found == 0
    reads = count_reads(monkeypatch)
    mapped = load(folder, shared=(second := view(memory)))
    layers = read.shape.num_layers
    assert second.found >= 2 * layers
    assert len(reads) <= 3 * layers + 1  # routers, their biases, the last norm
    (expected,) = PlainAttention(read).logits(("a", IDS))
    for model in (prepared, mapped):
        (found,) = PlainAttention(model).logits(("a", IDS))
        assert torch.equal(found, expected)


def test_other_weights_and_other_keys_are_made_anew(memory: int):
    made = []

    def make() -> torch.Tensor:
        made.append(1)
        return torch.arange(5.0) + len(made)

    first = view(memory).keep("x", make)
    assert torch.equal(view(memory).keep("x", make), first)
    assert torch.equal(view(memory, "b").keep("x", make), torch.arange(5.0) + 2)
    assert torch.equal(view(memory).keep("y", make), torch.arange(5.0) + 3)
    assert len(made) == 3


def test_views_stay_views_and_writes_stay_private(memory: int):
    def make() -> dict[str, torch.Tensor]:
        whole = torch.arange(12.0).view(3, 4)
        return {"whole": whole, "row": whole[1], "wide": torch.ones(1).expand(4), "none": torch.empty(0, 4)}

    mine, theirs = view(memory).keep("x", make), view(memory).keep("x", make)
    assert mine["wide"].stride() == (0,)
    assert mine["none"].shape == (0, 4)
    mine["whole"].zero_()
    assert mine["row"].tolist() == [0, 0, 0, 0]
    assert theirs["row"].tolist() == [4, 5, 6, 7]
    assert view(memory).keep("x", make)["row"].tolist() == [4, 5, 6, 7]


def test_what_a_killed_rank_began_does_not_count(memory: int):
    view(memory).keep("x", lambda: torch.ones(3))
    os.pwrite(memory, b"\xff" * 5000, os.fstat(memory).st_size)
    found = view(memory)
    assert found.keep("y", lambda: torch.full((3,), 2.0)).tolist() == [2, 2, 2]
    again = view(memory)
    for key, value in (("x", 1), ("y", 2)):
        assert again.keep(key, lambda: torch.zeros(3)).tolist() == [value] * 3


def test_processes_that_prepare_at_once_map_the_same_memory(memory: int):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)

    def rank(number: int) -> None:
        mine = view(memory)
        barrier.wait()
        for i in range(100):
            common = mine.keep(f"of all {i}", lambda: torch.full((4096,), float(i)))  # noqa: B023
            own = mine.keep(f"of {number} {i}", lambda: torch.full((8,), number + i / 128))  # noqa: B023
            assert common.tolist() == [i] * 4096
            assert own.tolist() == [number + i / 128] * 8

    ranks = [context.Process(target=rank, args=(i,)) for i in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert os.fstat(memory).st_size == (1 + 100 * 5 + 4 * 100) * mmap.PAGESIZE


FULL = """
import os, resource, sys, torch
from turnout.models.shared_weights import SharedWeights
from turnout.parallel.groups import SINGLE_RANK

view = SharedWeights(os.memfd_create("test"), "a", SINGLE_RANK)
first = view.keep("x", lambda: torch.arange(5.0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
for key in ("y", "z"):
    assert torch.equal(view.keep(key, lambda: torch.ones(1 << 16)), torch.ones(1 << 16))
assert torch.equal(view.keep("x", lambda: first + 1), torch.arange(5.0)), "what was shared still is"
"""


def test_weights_that_are_larger_than_files_may_be():
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [line] = done.stderr.splitlines()
    assert "`ulimit -f`" in line
