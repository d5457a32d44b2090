"""Tables measured in several calls: a later call goes on where an earlier one was cut off."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tools.tune_tiles import begun, layer_shape, left_of
from turnout.moe.backends.hopper import tuning_tables
from turnout.moe.backends.hopper.kernels import rule
from turnout.moe.backends.hopper.tuning_tables import Entry, Table, TileFile

NAMES = ["qwen3-30b", "gptoss-20b"]


def table(name: str, format: str) -> Table:
    shape = layer_shape(name, format)
    first, second = rule(shape, 16)
    return Table.now(shape, [Entry(tokens=16, first=first, second=second, us=1.0, rule_us=1.0)])


def test_goes_on(tmp_path: Path):
    file = tmp_path / "tables.json"
    assert begun(file, "GPU") == []
    every = left_of(["mxfp4", "fp8"], NAMES, [])
    assert every == [("qwen3-30b", "mxfp4"), ("gptoss-20b", "mxfp4"), ("qwen3-30b", "fp8")]
    tables = (table("qwen3-30b", "mxfp4"), msgspec.structs.replace(table("qwen3-30b", "fp8"), revision=0))
    tuning_tables.write(file, TileFile(device="GPU", versions=tuning_tables.versions(), tables=tables))
    assert left_of(["mxfp4", "fp8"], NAMES, begun(file, "GPU")) == every[1:]
    assert begun(file, "another GPU") == []
