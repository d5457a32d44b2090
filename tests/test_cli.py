"""The command line as its users meet it: help, configuration, generation, and errors of one line."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import safetensors.torch
from typer.testing import CliRunner

import turnout.bench.moe
import turnout.commands.plan
from tests.test_cli_flags import ROOT, SHARED, commands
from turnout import LLM, SamplingParams, __version__
from turnout.checkpoint.locate import locate
from turnout.cli import app, main
from turnout.config import PANELS, Config, ServerConfig
from turnout.flags import flag_name

COMMANDS = sorted(commands().keys() - {SHARED, ROOT})


def invoke(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def shell(*words: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turnout", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, input=stdin)


@pytest.fixture
def run(monkeypatch, capsys):
    """The entry point in this process: (exit code, standard output, standard error)."""

    def run(*words: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["turnout", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    done = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert f"{command} [OPTIONS]" in done.output
    for option in commands()[command]:
        if option.startswith("--") and not option.startswith("--no-"):
            assert option in done.output


def test_help_shows_what_a_flag_takes():
    done = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"})
    assert "[auto|cpu|cuda]" in done.output
    assert "--moe-activation-dtype <str>" in done.output


def test_help_of_serve_is_in_panels():
    """Every flag of the configuration stands in one, after the command's own options."""
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    parts = re.split(r"^(\S[\w ]*):$", text, flags=re.MULTILINE)[1:]
    shown = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(shown) == ["Arguments", "Options", *PANELS]
    fields = [f for f in dataclasses.fields(ServerConfig) if f.name != "model"]
    assert {f.metadata["panel"] for f in fields} == set(PANELS)
    for panel in PANELS:
        lines = [line.split()[0].rstrip(",") for line in shown[panel].splitlines() if line.startswith("  --")]
        assert lines == [flag_name(f.name) for f in fields if f.metadata["panel"] == panel]


def test_without_a_command_there_is_help():
    done = invoke()
    assert done.exit_code == 2
    assert all(command.split()[0] in done.output for command in COMMANDS)


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version(word, run):
    assert run(word) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag(command, run):
    code, _, err = run(*command.split(), "--no-such-flag")
    assert code == 2
    assert "No such option: --no-such-flag" in err


# Configuration


@pytest.fixture
def planned(monkeypatch) -> list[Config]:
    """The configurations that `turnout plan` was called with."""
    seen: list[Config] = []
    monkeypatch.setattr(turnout.commands.plan, "explain", lambda config, **_: seen.append(config) or 0)
    return seen


def test_flag_before_variable_before_file_before_default(planned, tmp_path, monkeypatch):
    file = tmp_path / "turnout.yaml"
    file.write_text("page-size: 4\nmax_running_requests: 5\ncontext-length: 6\n")
    monkeypatch.setenv("TURNOUT_PAGE_SIZE", "7")
    monkeypatch.setenv("TURNOUT_MAX_RUNNING_REQUESTS", "8")
    done = invoke("plan", "demo", "--config", file, "--page-size", 9)
    assert done.exit_code == 0, done.output
    [config] = planned
    assert (config.page_size, config.max_running_requests) == (9, 8)
    assert (config.context_length, config.mem_fraction_static) == (6, 0.85)


def test_the_model_named_is_the_model_even_if_a_file_names_another(planned, tmp_path, monkeypatch):
    (tmp_path / "turnout.yaml").write_text("model: other\n")
    monkeypatch.setenv("TURNOUT_MODEL", "third")
    invoke("plan", "demo", "--config", tmp_path / "turnout.yaml")
    assert planned[0].model == "demo"


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--tp", "2"], "tp_size", 2),
        (["--tensor-parallel-size", "2"], "tp_size", 2),
        (["--gpu-memory-utilization", "0.5"], "mem_fraction_static", 0.5),
        (["--max-num-seqs", "3"], "max_running_requests", 3),
        (["--enforce-eager"], "disable_cuda_graph", True),
        (["--disable-cuda-graph"], "disable_cuda_graph", True),
        (["--no-load-progress"], "load_progress", False),
    ],
)
def test_spellings_of_other_engines(words, field, value, planned):
    done = invoke("plan", "demo", *words)
    assert done.exit_code == 0, done.output
    assert getattr(planned[0], field) == value


def test_a_negative_flag_undoes_a_variable(planned, monkeypatch):
    monkeypatch.setenv("TURNOUT_DISABLE_PREFIX_CACHE", "1")
    invoke("plan", "demo")
    invoke("plan", "demo", "--no-disable-prefix-cache")
    assert [config.disable_prefix_cache for config in planned] == [True, False]


@pytest.fixture
def bare_config(tmp_path) -> Path:
    """A configuration of Qwen3-30B-A3B's kind, by itself and under a name of its own."""
    return Path(shutil.copyfile(locate("demo") / "config.json", tmp_path / "qwen3.json"))


def test_a_plan_of_a_configuration_by_itself(run, bare_config):
    code, out, err = run("plan", bare_config, "--hardware", "H100", "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert (plan["model"], plan["hardware"]["name"]) == (str(bare_config), "h100")
    _, folder, _ = run("plan", "demo", "--hardware", "h100", "--json")
    assert plan["memory"] == json.loads(folder)["memory"]


# Errors


def only_line(text: str) -> str:
    assert text.startswith("error: ")
    assert text.count("\n") == 1, text
    assert text.endswith("\n")
    return text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "/nowhere"], "no model '/nowhere'"),
        (["generate", "/nowhere", "hello"], "no model '/nowhere'"),
        (["plan", "demo", "--device", "tpu"], "--device 'tpu': must be one of auto, cpu, cuda"),
        (["plan", "demo", "--page-size", "0"], "--page-size 0: must be between"),
        (["plan", "demos"], "no model 'demos'"),
        (
            ["serve", "{bare}"],
            "qwen3.json is a configuration without weights, enough for `turnout plan` only",
        ),
        (["generate", "{bare}", "hello"], "qwen3.json is a configuration without weights"),
        (["quantize", "{bare}", "/tmp/never"], "qwen3.json is a configuration without weights"),
        (["plan", "demo", "--hardware", "abacus"], "--hardware 'abacus': unknown; known: cpu"),
        (["plan", "demo", "--config", "/nowhere.yaml"], "--config /nowhere.yaml: cannot be read"),
        (["generate", "demo", "x", "--temperature", "-1"], "temperature"),
        (["generate", "demo", "/nowhere.jsonl"], "/nowhere.jsonl: cannot be read (No such file"),
        (["generate", "demo"], "no PROMPT given and standard input is empty"),
        (["generate", "demo", "x", "--output", "/proc/x/y"], "--output /proc/x/y: cannot be written"),
        (["quantize", "demo", "/tmp/never"], "quantised already"),
        (["quantize", "demo", "/tmp/never", "--format", "int3"], "unknown format 'int3'"),
        (
            ["quantize", "demo", "/tmp/never", "--format", "fp8", "--calibration", "text.txt"],
            "--calibration is for --format nvfp4",
        ),
        (["quantize", "demo", "/tmp/never", "--calibration", "/nowhere"], "--calibration /nowhere"),
        (["bench", "moe", "--shape", "huge"], "unknown shape 'huge'; known: "),
        (["bench", "moe", "--format", "int3"], "unknown format 'int3'"),
        (["bench", "moe", "--routing", "random"], "unknown routing 'random'; known: uniform, zipf"),
        (["bench", "moe", "--device", "tpu"], "--device 'tpu': must be one of auto, cpu, cuda"),
        (["bench", "a2a", "--topk", "9", "--experts", "8"], "--topk 9: a layer of --experts 8"),
        (["bench", "moe", "--output", "/proc/x/y"], "--output /proc/x/y: cannot be written"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(words, message, run, bare_config):
    code, out, err = run(*(word.replace("{bare}", str(bare_config)) for word in words))
    assert (code, out) == (2, "")
    assert message in only_line(err)


def test_a_malformed_configuration_file_is_one_line(run, tmp_path):
    (tmp_path / "turnout.yaml").write_text("page_size: [1,\nother: {")
    code, _, err = run("plan", "demo", "--config", tmp_path / "turnout.yaml")
    assert code == 2
    assert "turnout.yaml: not valid YAML" in only_line(err)


def test_a_malformed_variable(run, monkeypatch):
    monkeypatch.setenv("TURNOUT_PORT", "http")
    code, _, err = run("serve", "demo")
    assert code == 2
    assert "TURNOUT_PORT='http': must be of type int" in only_line(err)


def test_a_refused_plan_lists_every_reason(run, tmp_path):
    code, _, err = run("generate", "demo", "x", "--quantization", "fp8", "--context-length", "9999")
    assert code == 2
    assert "Traceback" not in err
    assert "--quantization fp8" in err
    assert "--context-length 9999" in err
    assert err.count("Remedy: ") >= 2


def test_a_bug_keeps_its_traceback(run, monkeypatch):
    def broken(*_: object, **__: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(turnout.commands.plan, "explain", broken)
    monkeypatch.setattr(sys, "argv", ["turnout", "plan", "demo"])
    with pytest.raises(ZeroDivisionError):
        main()


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = shell("serve", "demo", "--port", port)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port}" in only_line(done.stderr)


def in_shell(words: str) -> subprocess.CompletedProcess[str]:
    command = f"{shlex.quote(sys.executable)} -m turnout {words}"
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("version <&- >&- 2>&-", 0, ""),
        ("plan demo >&-", 0, ""),
        ("generate demo <&-", 2, "error: generate: no PROMPT given and standard input is empty"),
        ("plan demo >/dev/full", 2, "error: the output cannot be written (No space left on device)"),
        ("generate demo hello --max-tokens 2 --output /dev/full", 2, "(No space left on device)"),
        ("plan demo --json | head -c 1", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full(words, code, message):
    done = in_shell(words)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not message or len(done.stderr.splitlines()) == 1


def test_a_current_folder_that_was_removed(tmp_path: Path):
    gone = tmp_path / "gone"
    code = f"mkdir {gone}; cd {gone}; rmdir {gone}; exec {sys.executable} -m turnout generate demo Tom"
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        ["sh", "-c", code], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": root}
    )
    assert done.returncode == 2
    assert done.stderr == "error: the current folder was removed; change to one that exists\n"


@pytest.mark.skipif(sys.platform != "linux", reason="others do not count what is mapped")
@pytest.mark.parametrize("command", ["generate demo Tom", "serve demo --port 0"])
def test_too_few_addresses_for_libraries(command):
    limited = f"ulimit -v 500000; exec {shlex.quote(sys.executable)} -m turnout {command}"
    done = subprocess.run(limited, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("error: this process may map 0.5 GB of memory")
    assert "`ulimit -v unlimited`" in line


def test_an_interrupt_while_modules_are_imported(tmp_path: Path, monkeypatch):
    """By one that goes on without what it cannot import, which loses a KeyboardInterrupt."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = subprocess.run(
        [sys.executable, "-m", "turnout", "serve", "demo", "--port", "0"],
        capture_output=True,
        text=True,
        # A shell that starts tests in the background has them ignore Ctrl-C, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_reader_that_left():
    shown = f"{sys.executable} -m turnout plan demo --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 1)  # 0: all of it fitted into the pipe


# Generation


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> dict[str, str]:
    prompts = ["One two", "three", "café"]
    with LLM(str(tiny_folder), device="cpu", load_progress=False) as llm:
        answers = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0))
    return {prompt: answer.text for prompt, answer in zip(prompts, answers, strict=True)}


def generate(run, tiny_folder, *words, stdin=""):
    code, out, err = run("generate", tiny_folder, *words, "--max-tokens", 6, "--device", "cpu", stdin=stdin)
    assert code == 0, err
    return out


def test_a_prompt_gives_its_text(run, tiny_folder, expected):
    assert generate(run, tiny_folder, "One two", "--no-chat") == expected["One two"] + "\n"


def test_standard_input_is_a_prompt(tiny_folder, expected):
    words = ["generate", tiny_folder, "--no-chat", "--max-tokens", 6, "--device", "cpu", "--no-load-progress"]
    done = shell(*words, stdin="One two")
    assert (done.returncode, done.stdout) == (0, expected["One two"] + "\n"), done.stderr


@pytest.mark.parametrize(("words", "stdin"), [((), "caf\udce9"), (("caf\udce9",), "")])
def test_a_prompt_that_is_not_utf8(words, stdin, run):
    """Python hands on such a byte as a lone surrogate."""
    code, out, err = run("generate", "demo", *words, stdin=stdin)
    assert (code, out) == (2, "")
    assert "not UTF-8 text (at character 3)" in only_line(err)


def test_lines_in_lines_out(run, tiny_folder, expected, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in expected) + "\n\n")
    rows = [json.loads(line) for line in generate(run, tiny_folder, file).splitlines()]
    assert {row["prompt"]: row["text"] for row in rows} == expected
    assert all(1 <= row["tokens"] <= 6 and row["finish_reason"] in ("stop", "length") for row in rows)
    generate(run, tiny_folder, file, "--output", tmp_path / "out.jsonl")
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert written == rows


def test_a_file_asked_for_gets_lines_even_for_one_prompt(run, tiny_folder, expected, tmp_path):
    assert generate(run, tiny_folder, "One two", "--no-chat", "--output", tmp_path / "out.jsonl") == ""
    row = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))
    assert (row["prompt"], row["text"]) == ("One two", expected["One two"])


def test_options_reach_the_sampler(run, tiny_folder, expected):
    text = expected["One two"]
    stop = text[2]
    assert (
        generate(run, tiny_folder, "One two", "--no-chat", "--stop", stop) == text[: text.index(stop)] + "\n"
    )


@pytest.fixture(scope="module")
def answer(tiny_folder: Path) -> str:
    """What the model says to "hi" through its chat template, which is not how it continues the text."""
    params = SamplingParams(max_tokens=6, temperature=0)
    with LLM(str(tiny_folder), device="cpu", load_progress=False) as llm:
        [chat], [plain] = llm.chat([{"role": "user", "content": "hi"}], params), llm.generate("hi", params)
    assert chat.text != plain.text
    return chat.text


def test_a_text_goes_through_the_chat_template(run, tiny_folder, answer):
    assert generate(run, tiny_folder, "hi") == answer + "\n"
    assert generate(run, tiny_folder, stdin="hi") == answer + "\n"


def test_a_file_goes_through_the_chat_template_if_asked_for(run, tiny_folder, answer, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi"}')
    plain, chat = (json.loads(generate(run, tiny_folder, file, *words)) for words in ((), ("--chat",)))
    assert chat["text"] == answer != plain["text"]


def test_a_model_without_a_chat_template_continues_a_text(run, tiny_folder, expected, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "base")
    strip_template(folder)
    assert generate(run, folder, "One two") == expected["One two"] + "\n"
    code, _, err = run("generate", folder, "One two", "--chat", "--device", "cpu")
    assert code == 2
    assert "has no chat template" in only_line(err)


def strip_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def overflowing(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with finite weights whose logits are not."""
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("overflowing") / "model")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["lm_head.weight"].fill_(3e38)
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_prompt_that_cannot_be_answered_fails(run, overflowing):
    code, out, err = run("generate", overflowing, "hi", "--device", "cpu")
    assert (code, out) == (1, "\n")
    assert "logits are not finite" in only_line(err)


def test_lines_that_cannot_be_answered_say_why(run, overflowing, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n' * 7)
    code, out, err = run("generate", overflowing, file, "--device", "cpu")
    assert code == 1
    for row in map(json.loads, out.splitlines()):
        assert row["finish_reason"] == "error"
        assert "logits are not finite" in row["error"]
    assert only_line(err).startswith(
        "error: prompt 1, 2, 3, 4, 5 and 2 more of 7: the model's logits are not"
    )


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "x"}', '{"prompt": 3}'])
def test_a_malformed_line_of_prompts(line, run, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n' + line)
    code, _, err = run("generate", "demo", tmp_path / "prompts.jsonl")
    assert code == 2
    assert "prompts.jsonl:2: " in only_line(err)


# Benchmarks


def test_bench_moe_passes_on_what_was_asked_for(monkeypatch, tmp_path):
    calls: list[dict] = []
    usual = {name: p.default for name, p in signature(turnout.bench.moe.run).parameters.items()}
    monkeypatch.setattr(turnout.bench.moe, "run", lambda **options: calls.append(options))
    words = [
        "--preset",
        "qwen3-30b",
        "--shape",
        "gptoss-20b",
        "--format",
        "mxfp4",
        "--tokens",
        "1",
        "--tokens",
        "64",
    ]
    words += ["--routing", "zipf", "--runner", "torch", "--device", "cpu", "--no-peers"]
    for given in ([], [*words, "--output", tmp_path / "x.json", "--plot", tmp_path / "x.svg"]):
        assert invoke("bench", "moe", *given).exit_code == 0
    defaults, asked = calls
    chosen = usual | defaults
    assert chosen["shapes"] == ("cpu-small",)
    assert (chosen["formats"], chosen["tokens"], chosen["peers"]) == (("bf16", "nvfp4"), (1, 16, 256), True)
    assert asked == {
        "shapes": ["qwen3-30b", "gptoss-20b"],
        "formats": ["mxfp4"],
        "tokens": [1, 64],
        "routing": "zipf",
        "runner": "torch",
        "device": "cpu",
        "peers": False,
        "output": tmp_path / "x.json",
        "plot": tmp_path / "x.svg",
    }


def test_bench_moe_refuses_fewer_than_no_tokens(run):
    code, _, err = run("bench", "moe", "--tokens", "-1")
    assert code == 2
    assert "--tokens" in err
