"""`turnout tune` on a real checkpoint: what it finds decides the next plan."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.moe.broken import offer
from turnout.commands.tune import tune
from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.engine.llm import LLM
from turnout.engine.sampling_params import SamplingParams
from turnout.errors import UserError
from turnout.moe.planning.runner_by_batch_size import ALL
from turnout.parallel.hardware import detect

FLAGS = {"device": "cpu", "load_progress": False, "max_prefill_tokens": 16, "chunked_prefill_size": 16}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "turnout"


def run(config: Config, **options) -> str:
    console = Console(file=io.StringIO(), width=200)
    assert tune(config, console=console, **options) == 0
    return console.file.getvalue()


def test_the_runner_measured_faster_is_taken_from_then_on(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    offer(monkeypatch, "Dawdles", preference=99)
    config = Config(model=str(tiny_folder), max_running_requests=16, **FLAGS)
    assert resolve(config).plan.prefill.runner == "Dawdles"
    text = run(config)
    assert "`auto` now takes runner numba" in text
    assert "not measured: runner hopper: device cpu: runs on cuda" in text
    assert len(list(cache.rglob("*.json"))) == 1
    after = resolve(config).plan
    assert after.prefill.runner == after.decode.runner == "numba"
    assert after.reasons[0].startswith("runner numba: measured ")
    other = resolve(Config(model=str(tiny_folder), dtype="bfloat16", **FLAGS)).plan
    assert other.prefill.runner == "Dawdles"  # measured for float32 alone


def test_runners_of_a_cpu_share_batch_sizes_as_a_table_says(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """One that was found, not measured here: for this processor with these units, and no other."""
    config = Config(model=str(tiny_folder), max_running_requests=16, **FLAGS)
    run(config)
    (file,) = cache.rglob("*.json")
    table = json.loads(file.read_bytes())
    assert {"numba", "torch"} <= table["microseconds"].keys()
    table["microseconds"] = {"numba": {"1": 10.0, "16": 100.0}, "torch": {"1": 90.0, "16": 20.0}}
    file.write_text(json.dumps(table))
    plan = resolve(config).plan
    assert plan.runner_by_batch_size == ((4, "numba"), (ALL, "torch"))
    assert any(line.startswith("batches of 1 to 4 by numba, 5 tokens and more by") for line in plan.reasons)
    with LLM.from_config(config) as llm:
        many = llm.generate([[5, 6, 7]] * 12, SamplingParams(max_tokens=3, ignore_eos=True, temperature=0))
        few = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True, temperature=0))
    assert {tuple(answer.token_ids) for answer in many} == {tuple(few[0].token_ids)}
    hardware = replace(detect("cpu"), processor="another")
    assert resolve(config, hardware).plan.runner_by_batch_size == ()


@pytest.mark.parametrize(
    "sizes", [{"ep_size": 2}, {"ep_size": 1}, {"dp_size": 2, "enable_dp_attention": True}]
)
def test_a_rank_among_several_is_measured_with_its_part_of_the_experts(
    sizes: dict, tiny_folder: Path, cache: Path
):
    config = Config(model=str(tiny_folder), tp_size=2, max_running_requests=16, **(FLAGS | sizes))
    content = json.loads(run(config, as_json=True))
    assert content["layer"]["topology"]["tp_size"] == 2
    assert list(content["microseconds"]["torch"]) == ["1", "4", "16", "64"]
    assert content["mean"]["torch"] > 0
    assert Path(content["file"]).parent == cache / "tune"


def test_a_runner_asked_for_leaves_nothing_to_measure(tiny_folder: Path):
    with pytest.raises(UserError, match="leave it at auto"):
        run(Config(model=str(tiny_folder), moe_runner_backend="torch", **FLAGS))


def test_a_cache_that_cannot_be_written_says_what_to_do(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(UserError, match=r"cannot be written; set XDG_CACHE_HOME"):
        run(Config(model=str(tiny_folder), max_running_requests=16, **FLAGS))
