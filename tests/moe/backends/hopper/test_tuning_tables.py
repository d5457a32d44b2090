"""Tables of tile configurations on disk: found by layer and device; left aside, with a reason, when they do
not count."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.moe.build import make_spec
from tools.tune_tiles import merged
from turnout.bench.moe import SHAPES
from turnout.errors import UserError
from turnout.moe.backends.hopper import tuning_tables
from turnout.moe.backends.hopper.kernels import Packed, rule
from turnout.moe.backends.hopper.layer_shape import REVISIONS, LayerShape
from turnout.moe.backends.hopper.tuning_tables import Entry, Table, TileFile
from turnout.moe.budget import Budget
from turnout.moe.plan import PlanRequest, plan
from turnout.parallel.hardware import GB, Hardware
from turnout.parallel.topology import Topology

H200 = Hardware(
    name="NVIDIA H200", device="cuda", architecture=90, memory_bytes=141 * GB, present=True, devices=1
)
SHAPE = LayerShape.of(make_spec(format="mxfp4"), num_local_experts=8, expert_tp=1)
FIRST, SECOND = Packed(128, 16, 64, 4, 4), Packed(64, 16, 64, 4, 4)
WRITTEN = '"block_n": 128, "block_m": 16, "block_k": 64, "num_stages": 4, "num_warps": 4'  # FIRST on disk

# As releases wrote it whose files had no version.
OLD = """{
"device": "NVIDIA H200",
"versions": {"triton": "3.6.0"},
"tables": [
{"shape": {"format": "mxfp4", "hidden": 128, "inner": 96, "w13_rows": 192, "num_experts": 8,
"local_experts": 8, "top_k": 2}, "revision": 10, "date": "2026-11-22", "commit": "24ef932", "entries": [
  {"tokens": 1, "first": [64, 1, 4, 1, 8, 1, 2], "second": [16, 1, 4, 3, 8, 4, 2], "sorted": false,
  "us": 20.58, "rule_us": 20.58}]}
]
}
"""


def table(entries: tuple[Entry, ...], **fields) -> Table:
    values = {"shape": SHAPE, "revision": REVISIONS["packed"], "date": "2026-11-21", "entries": entries}
    return Table(**(values | fields))


def content(*tables: Table, **fields) -> TileFile:
    entries = tuple(
        Entry(tokens=tokens, first=FIRST, second=SECOND, us=10.0, rule_us=11.0) for tokens in (1, 64)
    )
    values = {
        "device": H200.name,
        "versions": tuning_tables.versions(),
        "tables": tables or (table(entries),),
    }
    return TileFile(**(values | fields))


def kept(folder: Path, **fields) -> Path:
    return tuning_tables.write(tuning_tables.path(folder, SHAPE, H200), content(**fields))


def test_a_layers_own_table_is_found_and_no_other_layers(tmp_path: Path):
    assert tuning_tables.find(SHAPE, H200, tmp_path) == ()
    file = kept(tmp_path)
    table = tuning_tables.find(SHAPE, H200, tmp_path)
    assert [tokens for tokens, _ in table] == [1, 64]
    assert {tiles for _, tiles in table} == {(FIRST, SECOND)}
    assert list(file.parent.iterdir()) == [file]
    assert len(file.read_text().splitlines()) == 10  # an entry a line
    for other in (
        LayerShape.of(make_spec(format="nvfp4"), num_local_experts=8, expert_tp=1),
        LayerShape.of(make_spec(format="mxfp4"), num_local_experts=4, expert_tp=1),
        LayerShape.of(make_spec(format="mxfp4", top_k=1), num_local_experts=8, expert_tp=1),
    ):
        assert tuning_tables.find(other, H200, tmp_path) == ()
    elsewhere = Hardware(name="NVIDIA H100", device="cuda", architecture=90, memory_bytes=GB, present=True)
    assert tuning_tables.find(SHAPE, elsewhere, tmp_path) == ()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: text.replace('"entries"', '"lines"'), "cannot be read"),
        (lambda text: text.replace('"block_n": 128', '"block_n": "wide"'), "cannot be read"),
        (lambda text: text.replace('"kernel": "packed"', '"kernel": "unheard of"'), "cannot be read"),
        (lambda text: text.replace('"version": 2', '"version": 3'), "its form is version 3, not 2"),
        (lambda text: OLD, "its form is version 1, not 2"),
        (
            lambda text: text.replace('"top_k": 2', '"top_k": 4'),
            "it holds no tile configurations of this layer",
        ),
        (
            lambda text: text.replace("NVIDIA H200", "NVIDIA H20"),
            "configurations of this layer on NVIDIA H200",
        ),
        (lambda text: text.replace('"revision": ', '"revision": 9'), "kernels of revision 9"),
        (lambda text: text.replace(tuning_tables.versions()["triton"], "2.0"), "measured with triton 2.0"),
        (lambda text: text.replace('"tokens": 64', '"tokens": 1'), "its batches do not ascend"),
        (lambda text: text.replace('"us": 10.0', '"us": -1.0'), "the times at 1 tokens are none"),
        (
            lambda text: text.replace(WRITTEN, WRITTEN[:-1] + "2"),
            "no kernel runs what it has for 1 tokens: block_n 128 with num_warps 2",
        ),
        (
            lambda text: text.replace('"block_n": 64, "block_m": 16', '"block_n": 64, "block_m": 32'),
            "differ in block_m",
        ),
    ],
)
def test_tables_that_do_not_count_are_left_aside_with_a_warning(
    damage, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = kept(tmp_path)
    file.write_text(damage(file.read_text()))
    assert tuning_tables.find(SHAPE, H200, tmp_path) == ()
    assert said in caplog.text
    assert str(file) in caplog.text
    assert "turnout tune" in caplog.text


def test_a_machines_own_table_comes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tuning_tables, "SHIPPED", tmp_path / "shipped")
    entry = Entry(tokens=1, first=SECOND, second=SECOND, us=1.0, rule_us=1.0)
    tuning_tables.write(tuning_tables.shipped(H200.name), content(table((entry,))))
    assert [tiles.first for _, tiles in tuning_tables.find(SHAPE, H200, tmp_path)] == [SECOND]
    file = kept(tmp_path)
    assert tuning_tables.find(SHAPE, H200, tmp_path)[0][1].first == FIRST
    file.write_text("{}")
    assert [tiles.first for _, tiles in tuning_tables.find(SHAPE, H200, tmp_path)] == [SECOND]
    assert "left aside" in caplog.text


def planned(spec, **fields):
    budget = Budget.from_limits(chunked_prefill_size=256, max_prefill_tokens=256, max_running_requests=16)
    return plan(spec, topology=Topology(), budget=budget, hardware=H200, compute_dtype="bfloat16", **fields)


def test_plans_carry_tables_for_runners_that_are_cut_by_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tuning_tables, "SHIPPED", tmp_path)
    spec, given = make_spec(format="mxfp4"), ((1, rule(SHAPE, 1)),)
    assert planned(spec).tiles == ()
    assert planned(spec).reasons[-1].startswith("tilings by rule: none were measured")
    tuning_tables.write(tuning_tables.shipped(H200.name), content())
    assert [tokens for tokens, _ in planned(spec).tiles] == [1, 64]
    assert planned(spec).reasons[-1] == "tilings as measured on NVIDIA H200 for batches of 1, 64 tokens"
    assert planned(spec, tiles=given).tiles == given
    assert planned(spec, tiles=given, request=PlanRequest(moe_runner_backend="torch")).tiles == ()
    assert planned(spec, tiles=given, request=PlanRequest(deterministic=True)).tiles == ()


def shipped_tables() -> tuple[Table, ...]:
    """None between a change of kernels and the next measurement."""
    file = tuning_tables.shipped(H200.name)
    return msgspec.json.decode(file.read_bytes(), type=TileFile).tables if file.exists() else ()


def test_what_is_shipped_for_an_h200_counts_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tables = shipped_tables()
    monkeypatch.setattr(tuning_tables, "versions", lambda: {"triton": "3.6.0"})
    for table in tables:
        found = tuning_tables.find(table.shape, H200)
        assert [tokens for tokens, _ in found] == [entry.tokens for entry in table.entries]
        assert {1, 16, 256, 4096, 16384} <= {entry.tokens for entry in table.entries}
    known = [
        LayerShape.of(shape.spec(format), num_local_experts=shape.local, expert_tp=1)
        for name, shape in SHAPES.items()
        for format in ("mxfp4", "nvfp4", "bf16", "fp8")
        if name != "cpu-small"
    ]
    assert all(table.shape in known for table in tables)
    assert len({table.shape for table in tables}) == len(tables)
    assert not caplog.text


def test_the_rule_is_within_a_quarter_of_what_was_measured_best():
    for table in shipped_tables():
        for entry in table.entries:
            if rule(table.shape, entry.tokens) != entry.tiles:
                assert entry.rule_us <= 1.25 * entry.us, (table.shape, entry)


def test_parts_are_put_together_without_what_kernels_have_outgrown():
    entry = Entry(tokens=1, first=SECOND, second=SECOND, us=1.0, rule_us=1.0)
    other = LayerShape.of(make_spec(format="nvfp4"), num_local_experts=8, expert_tp=1)
    old, new = table((entry,)), table((entry,), commit="newer")
    stale = table((entry,), shape=other, revision=0)
    parts = [
        content(old, stale),
        content(new),
        content(table((entry,), shape=other), versions={"triton": "2"}),
    ]
    assert merged(parts).tables == (new,)
    with pytest.raises(UserError, match="NVIDIA H100, NVIDIA H200"):
        merged([content(old), content(new, device="NVIDIA H100")])
