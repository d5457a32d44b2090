"""`turnout verify`: what works passes, and a wrong expert is found."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.moe.broken import WRONG, offer
from tests.tiny import QWEN2_MOE, write_model
from turnout.commands.quantize import quantize
from turnout.commands.verify import verify
from turnout.config import Config
from turnout.engine.verify import Report, examine
from turnout.errors import UserError

CPU = torch.device("cpu")
SMALL = {"max_prefill_tokens": 64, "chunked_prefill_size": 64, "max_running_requests": 16}


def silent(what: str, done: int, total: int) -> None:
    pass


def report(model: Path | str, *, layers: str = "", **flags) -> Report:
    return examine(Config(model=str(model), device="cpu", **(SMALL | flags)), layers=layers, progress=silent)


def printed(model: Path | str, *, show_all: bool = False, **flags) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100)
    config = Config(model=str(model), device="cpu", load_progress=False, **(SMALL | flags))
    code = verify(config, show_all=show_all, console=console)
    return code, console.file.getvalue()


@pytest.fixture(scope="module")
def w4a4(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("w4a4") / "out"
    quantize(str(tiny_folder), out, "nvfp4", samples=["some text, to be read once"])
    return out


@pytest.mark.more
def test_every_setting_of_a_w4a4_checkpoint_passes_on_its_own_inputs(w4a4: Path):
    found = report(w4a4)
    assert found.passed, found.describe()["failures"]
    settings = {(one.activation_format, one.weight_storage) for one in found.checked}
    assert settings == {(a, s) for a in ("bf16", "nvfp4") for s in ("packed", "decoded")}
    assert {one.layer for one in found.checked} == {0, 1}
    assert {one.dispatcher for one in found.checked} >= {"none"}
    batches = ["0", "1", "3", "17", "64", "one expert", "each expert", "padding"]
    assert all([result.batch for result in one.results] == batches for one in found.checked)
    assert found.inputs == "text"
    assert found.logits.error < 1e-4
    refused = " ".join(map(str, found.refused))
    assert "runner hopper: device cpu: runs on cuda" in refused


def test_a_model_with_shared_experts_in_bfloat16(tmp_path: Path):
    write_model(tmp_path, QWEN2_MOE, dtype=torch.bfloat16)
    found = report(tmp_path, dtype="bfloat16", moe_a2a_backend="none")
    assert found.passed, found.describe()
    assert 1e-4 < max(r.error for one in found.checked for r in one.results) < 1e-2
    assert found.logits.error > 1e-4  # rounding is seen


def test_the_first_layer_of_the_demo_model():
    found = report("demo", layers="first", moe_a2a_backend="none")
    assert found.passed, found.describe()["failures"]
    assert found.layers == (0,)
    assert found.logits.agreeing == 1
    assert any(result.independent for one in found.checked for result in one.results)


@pytest.mark.parametrize("wire", ["fp8", pytest.param("nvfp4", marks=pytest.mark.more)])
def test_tokens_that_are_rounded_on_their_way_are_compared_with_such(wire: str):
    found = report("demo", layers="first", moe_dispatch_dtype=wire, moe_weight_storage="packed")
    assert found.passed, found.describe()["failures"]
    assert {one.dispatcher for one in found.checked} == {"collective", "collective-experts"}
    # Sums in another order, as another CPU makes them, take single values to the neighbouring code.
    assert found.logits.error < 2e-3


def test_what_is_asked_for_is_all_that_is_run(tiny_folder: Path):
    found = report(tiny_folder, moe_weight_storage="packed", moe_a2a_backend="none", layers="1")
    assert {(one.layer, one.weight_storage, one.dispatcher) for one in found.checked} == {
        (1, "packed", "none")
    }


def test_a_wrong_expert_fails_and_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Preferred to others, it runs the model too, whose logits show it."""
    offer(monkeypatch, "WrongExpert", preference=99)
    code, text = printed(tiny_folder, moe_a2a_backend="none")
    assert code == 1
    assert "runner WrongExpert, dispatcher none" in text
    assert f"wrong for expert {WRONG}" in " ".join(text.split())
    assert "FAILED layer 0, WrongExpert / none / bf16 / decoded" in " ".join(text.split())
    assert "FAILED layer 0, torch" not in text
    found = report(tiny_folder, moe_a2a_backend="none")
    assert not found.logits.passed
    assert all(one.passed for one in found.checked if one.runner == "torch")


def test_a_runner_that_cannot_be_built_hides_nothing_else(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, "CannotPrepare", preference=-99)
    found = report(tiny_folder, moe_a2a_backend="none")
    assert {one.runner for one in found.checked if one.passed} == {"torch", "numba"}
    assert any("no kernel for this shape" in line for line in found.describe()["failures"])
    code, text = printed(tiny_folder, moe_a2a_backend="none")
    assert code == 1
    assert "no kernel for this shape" in " ".join(text.split())


def test_layers_that_are_no_moe_layers_are_refused(tmp_path: Path):
    write_model(tmp_path, num_hidden_layers=3, mlp_only_layers=[0])
    assert report(tmp_path, layers="first", moe_a2a_backend="none").layers == (1,)
    assert report(tmp_path, layers="all", moe_a2a_backend="none").layers == (1, 2)
    for wrong in ("0", "1,3", "-1", "last", ","):
        with pytest.raises(
            UserError, match=r"--layers .* names no MoE layer.*use first, all, or some of 1, 2"
        ):
            report(tmp_path, layers=wrong)


def test_without_a_tokenizer_tokens_are_drawn(tmp_path: Path):
    write_model(tmp_path)
    for file in tmp_path.glob("token*"):
        file.unlink()
    found = report(tmp_path, moe_a2a_backend="none")
    assert found.inputs == "random tokens"
    assert found.passed


def test_several_ranks_are_for_serve(tiny_folder: Path):
    with pytest.raises(UserError, match=r"--tp-size 2: verify runs on one rank.*serve --verify full"):
        report(tiny_folder, tp_size=2, ep_size=2)


def test_from_the_command_line(tiny_folder: Path):
    words = [str(tiny_folder), "--device", "cpu", "--json", "--layers", "first", "--seed", "3"]
    words += ["--moe-a2a-backend", "none"]
    command = [sys.executable, "-m", "turnout.cli", "verify", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["passed"]
    assert content["layers"] == [0]
    assert content["most_tokens"] == 256 < content["budget_tokens"]
    assert content["checked"][0]["results"][0] == {
        "batch": "0",
        "tokens": 0,
        "bound": 1e-5,
        "error": 0.0,
        "repeats": True,
        "replays": None,
        "independent": None,
        "problem": "",
    }
    assert content["refused"]


def test_the_verdict_comes_first_and_refusals_are_counted(tiny_folder: Path):
    """Two lines say what passed and by what margin; what was not asked for is listed with --all only."""
    code, text = printed(tiny_folder, moe_runner_backend="torch")
    assert code == 0
    lines = text.splitlines()
    assert lines[1].startswith("passed: ")
    unwrapped = " ".join(text.split())  # which setting is nearest to its bound depends on the processor
    assert re.search(r"experts: at most [\d.]+% of the bound: error \S+ of 1e-05 \(torch / \w+", unwrapped)
    assert re.search(r"[\d.]+% of the bound: error", " ".join(lines[3:5]))
    assert "refused" not in text
    told = re.search(r"Not run: (\d+) refusals of \d+ backends", text)
    assert told
    _, every = printed(tiny_folder, moe_runner_backend="torch", show_all=True)
    refused = every.partition("Not run, for it is refused\n")[2]
    assert refused.count("  - ") == int(told[1])
