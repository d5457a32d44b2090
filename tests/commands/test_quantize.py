"""`turnout quantize` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.test_calibration import SAMPLES
from tests.tiny import write_model
from tools.demo.export import decoded
from turnout import LLM, SamplingParams
from turnout.checkpoint.locate import locate
from turnout.commands import quantize as command
from turnout.commands.quantize import quantize
from turnout.errors import PlanRefused, UserError
from turnout.evals.tasks import is_correct, load_task


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    return folder


@pytest.mark.parametrize("case", ["format", "exists", "unwritable", "quantised", "nowhere", "stacked"])
def test_what_must_be_refused_is_refused_before_the_model_runs(case, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "calibrate", lambda *_: pytest.fail("the model ran"))
    source, out, format = str(tiny), tmp_path / "out", "nvfp4"
    match case:
        case "format":
            format, words = "int3", ["int3", "nvfp4, mxfp4, fp8, int4, bf16"]
        case "exists":
            out.mkdir()
            words = [str(out), "exists already"]
        case "unwritable":
            out, words = Path("/proc/out"), ["cannot write /proc/out"]
        case "quantised":
            source, words = "demo", ["quantised already"]
        case "nowhere":
            source, words = str(tmp_path / "none"), ["no model"]
        case "stacked":
            write_model(tmp_path / "in", num_hidden_layers=1, intermediate_size=16)
            config = json.loads((tmp_path / "in/config.json").read_text())
            (tmp_path / "in/config.json").write_text(json.dumps(config | {"num_local_experts": 3}))
            source, words = str(tmp_path / "in"), ["wrong number of experts"]
    with pytest.raises(UserError) as caught:
        quantize(source, out, format, samples=SAMPLES)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_model_that_cannot_run_here_says_how_to_do_without(tmp_path):
    write_model(tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | {"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(UserError, match=r"--no-calibrate.*OtherForCausalLM"):
        quantize(str(tmp_path / "in"), tmp_path / "out", "nvfp4", samples=SAMPLES)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    quantize(str(tmp_path / "in"), tmp_path / "out", "nvfp4")


def test_a_model_without_tokenizer_says_how_to_do_without(tmp_path):
    write_model(tmp_path / "in")
    for file in (tmp_path / "in").glob("token*"):
        file.unlink()
    with pytest.raises(UserError, match=r"--no-calibrate.*tokenizer"):
        quantize(str(tmp_path / "in"), tmp_path / "out", "nvfp4", samples=SAMPLES)


@pytest.mark.parametrize("samples", [[], [""]])
def test_nothing_to_read_is_refused(samples, tiny, tmp_path):
    with pytest.raises(UserError, match="no text to calibrate with"):
        quantize(str(tiny), tmp_path / "out", "nvfp4", samples=samples)
    assert not list(tmp_path.iterdir())


def turnout(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turnout.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def demo_bf16(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "bf16"
    decoded(locate("demo"), folder)
    return folder


@pytest.mark.parametrize("format", [pytest.param("nvfp4", marks=pytest.mark.more), "fp8"])
def test_the_demo_model_quantised_still_solves_its_problems(format, demo_bf16, tmp_path):
    out = tmp_path / "out"
    done = turnout("quantize", demo_bf16, out, "--format", format)
    assert (done.returncode, done.stdout) == (0, f"wrote {out}\n"), done.stderr
    assert "quantising" in done.stderr
    assert ("calibrating" in done.stderr) == (format == "nvfp4")
    questions = load_task("wordmath", 4, seed=11)
    asked = "nvfp4" if format == "nvfp4" else "auto"  # W4A4, as calibrated
    with LLM(str(out), device="cpu", moe_activation_dtype=asked, load_progress=False) as llm:
        assert llm.info()["description"]["moe"]["format"] == format
        assert llm.info()["plan"]["activation_format"] == ("nvfp4" if format == "nvfp4" else "bf16")
        chats = [[{"role": "user", "content": q.text}] for q in questions]
        answers = llm.chat(chats, SamplingParams(max_tokens=256, temperature=0))
    right = [is_correct(a.text, q) for a, q in zip(answers, questions, strict=True)]
    assert sum(right) >= 3


def test_weights_alone_from_the_command_line(tiny, tmp_path):
    done = turnout("quantize", tiny, tmp_path / "out", "--no-calibrate")
    assert done.returncode == 0, done.stderr
    with LLM(str(tmp_path / "out"), device="cpu", load_progress=False) as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=4))[0].token_ids
    with pytest.raises(PlanRefused, match="nvfp4"):
        LLM(str(tmp_path / "out"), device="cpu", moe_activation_dtype="nvfp4")


def test_text_of_ones_own_calibrates(tiny, tmp_path):
    (tmp_path / "text.txt").write_text("first line\n\nsecond line\n")
    done = turnout("quantize", tiny, tmp_path / "out", "--calibration", tmp_path / "text.txt")
    assert done.returncode == 0, done.stderr
    quantize(str(tiny), tmp_path / "same", "nvfp4", samples=["first line", "second line"])
    ours, same = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("out", "same"))
    assert ours == same
