"""The worker's self-check (`serve --verify`): what works passes, a wrong expert keeps a rank from serving."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.moe.broken import WRONG, offer
from tests.tiny import write_model
from turnout.checkpoint import open_checkpoint
from turnout.config import Config
from turnout.engine.builder import build_engine
from turnout.engine.engine_plan import EnginePlan, resolve
from turnout.engine.selfcheck import SelfCheck
from turnout.engine.startup import StartupTimes
from turnout.engine.worker import Start, load
from turnout.errors import UserError
from turnout.models import load_model
from turnout.models.interface import Model
from turnout.parallel.groups import SINGLE_RANK, Groups

CPU = torch.device("cpu")
SMALL = {"max_prefill_tokens": 64, "chunked_prefill_size": 64, "max_running_requests": 16}


def started(folder: Path, config: Path | str, verify: str) -> dict:
    """What the worker announces, once it may serve."""
    events: list = []
    start = Start(
        folder=str(folder),
        config={"model": str(config), "device": "cpu", "load_progress": False, **SMALL},
        rank=0,
        init_method="",
        commands="",
        events="",
        identity="",
        verify=verify,
    )
    load(start, events.append, StartupTimes())
    return events[-1].info["verify"]


@pytest.mark.parametrize(("extent", "batches"), [("quick", "17"), ("full", "64")])
def test_a_worker_says_what_it_checked(extent: str, batches: str, tiny_folder: Path, tmp_path: Path):
    info = started(tmp_path, tiny_folder, extent)
    assert info["extent"] == extent
    assert info["passed"]
    assert 0 < info["seconds"] < 60
    assert [one["layer"] for one in info["layers"]] == [0, 1]
    assert [result["batch"] for result in info["layers"][0]["results"]][-4] == batches


def test_a_worker_that_is_not_told_to_checks_nothing(tiny_folder: Path, tmp_path: Path):
    assert started(tmp_path, tiny_folder, "off") == {"extent": "off"}


def test_a_worker_does_not_serve_with_a_wrong_expert(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    offer(monkeypatch, "WrongExpert", preference=99)
    with pytest.raises(UserError) as caught:
        started(tmp_path, tiny_folder, "quick")
    message = str(caught.value)
    assert (
        f"layer 0, WrongExpert / - / bf16 / decoded, batch each expert: wrong for expert {WRONG}" in message
    )
    assert "--moe-runner-backend" in message
    assert "--verify off" in message


def test_a_server_with_broken_weights_does_not_start(tmp_path: Path):
    """Every number of theirs is finite, but sums of their products are not."""
    write_model(tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.3.down_proj.weight"][0] = torch.finfo(torch.float32).max
    save_file(tensors, file, {"format": "pt"})
    command = [sys.executable, "-m", "turnout.cli", "serve", str(tmp_path), "--port", "0", "--device", "cpu"]
    done = subprocess.run([*command, "--verify", "quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "batch each expert: no runner can be right: weights of expert 3" in done.stderr
    assert "is ready" not in done.stdout


def watched_model(engine_plan: EnginePlan, check: SelfCheck, groups: Groups) -> Model:
    """Whose experts `check` keeps what it needs of."""
    return load_model(
        open_checkpoint(engine_plan.folder),
        engine_plan.plan,
        groups=groups,
        device=CPU,
        dtype=torch.float32,
        make_runner=check.make_runner,
    )


def test_what_was_kept_for_the_check_is_let_go(tiny_folder: Path):
    engine_plan = resolve(Config(model=str(tiny_folder), device="cpu", **SMALL))
    check = SelfCheck(engine_plan, "quick", CPU)
    model = watched_model(engine_plan, check, SINGLE_RANK)
    watched = list(check._watch.watched.values())
    assert all(one.experts is not None for one in watched)
    check.run(model)
    assert all(one.experts is None for one in watched)
    core = build_engine(engine_plan, model=model)
    assert core.info()["verify"] == {"extent": "off"}


def check_own_slice(rank, folder: str, broken: bool) -> dict | str:
    """Each of two ranks: its own experts, after one forward of both."""
    sizes = {"dp_size": 2, "ep_size": 2}
    with pytest.MonkeyPatch.context() as patch:
        if broken:
            offer(patch, "WrongExpert", preference=99)
        flags = {"tp_size": 2, "enable_dp_attention": True, "device": "cpu"} | sizes | SMALL
        engine_plan = resolve(Config(model=folder, **flags), rank=rank.number)
        check = SelfCheck(engine_plan, "quick", CPU)
        model = watched_model(engine_plan, check, rank.groups(**sizes))
        try:
            return check.run(model)
        except UserError as error:
            return str(error)


def test_each_rank_checks_its_own_experts(tiny_folder: Path, ranks):
    for info in ranks(2).run(check_own_slice, str(tiny_folder), False):
        assert info["passed"]
        each = next(r for r in info["layers"][0]["results"] if r["batch"] == "each expert")
        assert each["tokens"] == 4
    first, second = ranks(2).run(check_own_slice, str(tiny_folder), True)
    assert f"wrong for expert {WRONG}" in first
    assert second["passed"]
