"""Kernels compiled without a GPU to be compared: each is among them, and what changes one is seen."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.kernels.compiled import compiled
from tools import compiled_kernels
from turnout import kernels
from turnout.kernels.nvlink.batched_experts import PAIRS, find_places
from turnout.moe.backends.hopper.tile_config import SHARED_BYTES

LAUNCH = re.compile(r"^ +(\w+)\[.*\]\(", re.MULTILINE)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the tool with these arguments behind `record FILE`."""

    def run(name: str, *arguments: str) -> Path:
        file = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["compiled_kernels", "record", str(file), *arguments])
        assert compiled_kernels.main() == 0
        return file

    return run


def compare(old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["compiled_kernels", "compare", str(old), str(new)])
    return compiled_kernels.main()


def test_every_kernel_that_is_launched_is_among_these():
    text = [path.read_text() for path in Path(kernels.__path__[0]).rglob("*.py")]
    launched = set(LAUNCH.findall("\n".join(text)))
    assert len(launched) > 40
    assert {variant.name for variant in compiled_kernels.variants("", 1)} >= launched


def test_it_is_the_ptx_that_triton_launches():
    """Next to Triton's own compiler, which also writes line numbers."""
    (variant,) = compiled_kernels.variants("find_places", 1)
    integers = dict.fromkeys(("ids_ptr", "counts_ptr"), "*i32") | {"places_ptr": "*i64"}
    done = compiled(find_places, {"PAIRS": PAIRS}, warps=4, multiples=("first",), **integers)
    found, shared = compiled_kernels.ptx(variant)
    assert shared == done.metadata.shared
    instruction = re.compile(r"^\s*(?:@%p\d+ )?[a-z][\w.]*\s.*;$", re.MULTILINE)
    ours, theirs = (
        [
            re.sub(r"//.*", "", line).split()
            for line in instruction.findall(text.replace("find_places", "kernel"))
        ]
        for text in (found, done.asm["ptx"])
    )
    assert len(ours) > 50
    assert ours == theirs


def test_a_changed_kernel_is_seen(recorded, monkeypatch: pytest.MonkeyPatch, capsys):
    only = "--only", "nvlink.batched_experts"
    old, again = recorded("old.json", *only), recorded("again.json", *only, "--ptxas")
    kernels = json.loads(again.read_text())["kernels"]
    assert len(kernels) == 3
    assert all(kernel["registers"] > 8 and kernel["spills"] == 0 for kernel in kernels.values())
    assert compare(old, again, monkeypatch) == 0
    source = find_places.src
    try:
        find_places._unsafe_update_src(source.replace("+ count + before", "+ before + count * 2"))
        changed = recorded("changed.json", *only)
    finally:
        find_places._unsafe_update_src(source)
    capsys.readouterr()
    assert compare(old, changed, monkeypatch) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("differs: nvlink.batched_experts.find_places(")
    assert last == "3 and 3 variants; 1 differences"


SPILLS = {  # bytes
    "attention.latent_specialised.attend_latent_span_specialised": 16,
}


@pytest.mark.more
def test_each_kernel_compiles_and_assembles_and_spills_no_more_than_is_known(recorded):
    content = json.loads(recorded("all.json", "--each", "1", "--ptxas").read_text())
    assert len(content["kernels"]) > 60
    for made_of, kernel in content["kernels"].items():
        assert kernel["shared"] <= SHARED_BYTES
        assert kernel["spills"] <= SPILLS.get(made_of.split("(")[0], 0), made_of
