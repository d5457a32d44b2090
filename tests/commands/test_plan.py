"""`turnout plan` as a user sees it: text, JSON, exit codes, and the time it takes."""

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tests.checkpoint.test_formats import SIZE
from tests.checkpoint.writers import write_checkpoint
from tests.engine.planned import NVFP4, QWEN3_30B, SMALL, write
from turnout.commands.plan import explain
from turnout.config import Config
from turnout.errors import UserError
from turnout.moe.capabilities.declared import RUNNERS
from turnout.parallel.hardware import hardware_names

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = Path(__file__).parents[1] / "models" / "published"
PAGE = DOCS / "parallelism.md"

QWEN3_235B = {  # what differs from the smaller one
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}


@pytest.fixture
def model(tmp_path):
    return partial(write, tmp_path)


def run(config, *, hardware=None, as_json=False):
    """(exit code, what was printed)."""
    out = io.StringIO()
    code = explain(config, hardware=hardware, as_json=as_json, console=Console(file=out, width=200))
    return code, out.getvalue()


def cells(text, title="What runs"):
    """The rows of the table under `title`, by their first cell; those of "Ranks" hold it too."""
    table = text.partition(f"{title} ")[2].partition("└")[0]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    return {row[0]: row if title == "Ranks" else row[1:] for row in rows}


def test_a_plan_for_damaged_weights_says_so(tiny_folder, tmp_path, capsys):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = Config(model=str(folder), device="cpu")
    assert run(config)[0] == 0
    assert capsys.readouterr().err == ""
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    assert run(config)[0] == 0
    assert f"warning: a server would not load this: {file}" in capsys.readouterr().err


def command(*arguments):
    run = [sys.executable, "-m", "turnout.cli", "plan", *arguments]
    return subprocess.run(run, capture_output=True, text=True, check=False)


def test_requests_that_fit_at_once(model):
    """In 65,536 tokens of KV cache, but no more than may run."""
    config = model(QWEN3_30B, max_total_tokens=65536, max_running_requests=6)
    code, text = run(config, hardware="h200")
    assert code == 0
    table = cells(text, "Requests at once per rank")
    assert {size: requests for size, (requests,) in table.items() if size[0].isdigit()} == {
        "8,192": "6",
        "32,768": "2",
        "40,960": "1",
    }
    kv = json.loads(run(config, hardware="h200", as_json=True)[1])["kv"]
    assert kv["requests_at_once"] == {"8192": 6, "32768": 2, "40960": 1}


@pytest.mark.parametrize("hardware", hardware_names())
def test_every_hardware_can_be_planned_for(model, hardware):
    code, text = run(model(SMALL | NVFP4), hardware=hardware)
    assert code == 0
    assert f"1 x {hardware} (" in text
    for part in ("runner", "dispatcher", "Why", "Bytes per rank", "KV cache", "Token bounds per rank"):
        assert part in text


@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("int4-g32", "the files hold experts in int4 (int4)"),
        ("int4-bf16", ""),
        ("fp8-dynamic", "the files hold experts in fp8 (fp8_channel)"),
        ("bf16", ""),
    ],
)
def test_experts_that_are_decoded_while_they_load_are_named(format, said, tmp_path):
    write_checkpoint(tmp_path, format, **SIZE)
    code, text = run(Config(model=str(tmp_path), device="cpu"))
    assert code == 0
    assert said in text
    assert ("in a form that no runner multiplies in" in text) == bool(said)


def test_reasons_and_sizes_are_shown(model):
    _, text = run(model(QWEN3_30B | NVFP4), hardware="h200")
    assert "48 layers, 48 of them with top-8 of 128 experts in nvfp4" in text
    assert "activations bf16: weight-only, for h200 has no FP4 units" in text
    assert "weights packed: 16.3 GB for 48 layers" in text
    packed = 48 * (
        128 * (3 * 768 * 2048 * 9 // 16 + 2 * 4) + 2 * 4 * 128
    )  # codes and scales of both matrices
    assert f"{packed:,}" in text
    assert "40,960" in text


def test_a_given_kv_cache_leaves_the_longest_steps_that_memory_holds(model):
    """Few tokens of it for each request are no reason for short steps, which would not make it larger."""
    for flags in ({"max_total_tokens": 16_384}, {"max_total_tokens": 65_536, "max_running_requests": 256}):
        code, text = run(model(QWEN3_30B | NVFP4, **flags), hardware="h200")
        tokens = f"{flags['max_total_tokens']:,}"
        assert code == 0
        assert f"  - --max-prefill-tokens 8192: fits next to the KV cache of {tokens} tokens that was" in text
        assert "256 tokens a running request" in text
    _, text = run(model(QWEN3_30B | NVFP4, max_total_tokens=16_384), hardware="h200")
    assert "  - --max-running-requests 64: with more, requests would have too little KV cache" in text


def test_memory_bounds_steps_next_to_a_given_kv_cache(model):
    """Of the largest cache that leaves room for steps of 2,048 tokens, and so none for more."""
    sizes = {"max_running_requests": 64}
    _, text = run(model(QWEN3_30B | NVFP4, **sizes, max_prefill_tokens=2048), hardware="h200", as_json=True)
    tokens = json.loads(text)["kv"]["tokens"]
    _, text = run(model(QWEN3_30B | NVFP4, **sizes, max_total_tokens=tokens), hardware="h200")
    assert "  - --max-prefill-tokens 2048: the plan refuses more: the KV cache does not fit" in text


def test_candidates_refused_take_a_line_each(model):
    weight_only = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}
    _, text = run(model(SMALL | weight_only), hardware="b200")
    refused = text.partition("Considered and refused")[2]
    lines = [line for line in refused.splitlines() if line.startswith("  - runner torch:")]
    assert len(lines) == 1
    assert "--moe-activation-dtype nvfp4: W4A4 needs calibrated input scales" in lines[0]
    _, text = run(model(SMALL | weight_only), hardware="b200", as_json=True)
    assert any("turnout quantize" in r["remedy"] for r in json.loads(text)["plan"]["refused"])


def test_several_ranks_are_explained(model):
    code, text = run(model(QWEN3_30B, tp_size=8, ep_size=4), hardware="h200")
    assert code == 0
    assert "1 data-parallel group(s) of 8 for attention, 4 expert-parallel slice(s) of 2 for experts" in text
    rows = cells(text)
    assert rows["sum over ranks made by"] == ["the layer", "the layer"]
    assert rows["tokens dispatched in"] == ["nothing is sent", "nothing is sent"]
    assert ["5", "0", "group 0, part 5 of 8", "64..95, part 1 of 2"] in cells(text, "Ranks").values()
    assert "shared expert" not in rows


def test_data_parallel_ranks_are_explained(model):
    flags = {"tp_size": 4, "dp_size": 2, "ep_size": 4, "enable_dp_attention": True}
    _, text = run(model(QWEN3_30B, max_dispatch_tokens_per_rank=3000, **flags), hardware="h200")
    assert "2 data-parallel group(s) of 2 for attention, 4 expert-parallel slice(s) of 1 for experts" in text
    assert cells(text)["sum over ranks made by"] == ["the dispatcher", "the dispatcher"]
    assert cells(text)["tokens dispatched in"] == ["bfloat16", "bfloat16"]
    assert ["3", "0", "group 1, part 1 of 2", "96..127"] in cells(text, "Ranks").values()
    bounds = cells(text, "Token bounds per rank")
    assert bounds["gathered over data-parallel groups"] == ["16,384"]
    assert bounds["all-to-all capacity"] == ["3,000"]
    assert bounds["received through an all-to-all"] == ["6,000"]


def test_a_shared_expert_is_explained(model):
    fields = QWEN3_30B | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 1408,
    }
    fields = {name: value for name, value in fields.items() if name not in ("head_dim", "attention_bias")}
    for flags, where in (
        ({}, "a part on each rank"),
        ({"dp_size": 4, "enable_dp_attention": True}, "whole on each rank"),
        ({"moe_a2a_backend": "collective"}, "whole on each rank"),
    ):
        _, text = run(model(fields, tp_size=4, **flags), hardware="h200")
        assert cells(text)["shared expert"] == [where, where]
    assert "shared expert" not in cells(run(model(fields), hardware="h200")[1])


def test_json_is_the_whole_plan(model):
    code, text = run(model(QWEN3_30B | NVFP4), hardware="h100", as_json=True)
    values = json.loads(text)
    assert code == 0
    assert values["refused"] is False
    assert values["plan"]["decode"]["runner"] in RUNNERS
    assert values["hardware"]["name"] == "h100"
    assert values["budget"]["local"] == 8192
    assert values["memory"]["experts"] == 48 * values["plan"]["weight_bytes"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_refusal_prints_every_reason_and_exits_with_2(model, as_json):
    config = model(quantization="fp8", moe_runner_backend="no_such_runner", context_length=10**6)
    code, text = run(config, hardware="b200", as_json=as_json)
    assert code == 2
    for reason in (
        "--quantization fp8",
        "--moe-runner-backend no_such_runner",
        "--context-length 1000000",
    ):
        assert reason in text
    if as_json:
        values = json.loads(text)
        assert values["refused"] is True
        assert all(r["who"] and r["asked"] and r["limit"] and r["remedy"] for r in values["refusals"])
    else:
        assert text.count("remedy") == text.count("limit") >= 3


def test_the_page_about_ranks_shows_what_is_printed():
    shown = PAGE.read_text().partition("```text\nParallel layouts")[2].partition("```")[0]
    _, text = run(Config(device="cpu", tp_size=4))
    printed = text.partition("\nParallel layouts")[2].partition("  ask with")[0]
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_markup_in_a_folder_name_is_printed_as_it_is(tmp_path):
    folder = tmp_path / "[red]model[nothing]"
    folder.mkdir()
    _, text = run(write(folder), hardware="cpu")
    assert "[red]model[nothing]: Qwen3Moe" in text


def test_an_unknown_hardware_is_a_user_error(model):
    with pytest.raises(UserError, match="gb300"):
        run(model(), hardware="h9000")


def test_the_command_takes_a_bare_config(model):
    file = model(QWEN3_30B).model + "/config.json"
    done = command(file, "--hardware", "h200", "--tp", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["topology"]["tp_size"] == 2


def test_the_command_takes_little_time(model):
    """Half a second where nothing else runs. Processor time, the best of three, for a busy machine."""
    folder = model(QWEN3_30B).model

    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert command(folder, "--hardware", "h200").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(seconds() < 1.5 for _ in range(3))


def test_the_command_refuses_without_a_traceback(model):
    folder = model().model
    for arguments, words in (
        ([folder, "--hardware", "b200", "--dp", "2", "--tp", "2", "--ep", "3"], "enable-dp-attention"),
        ([folder + "/none"], "none"),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert words in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("page", "fields", "flags"),
    [
        ("operations.md", {}, {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}),
        ("sizing.md", QWEN3_235B, {"tp_size": 4}),
    ],
)
def test_plans_that_pages_show_are_those_made(model, page, fields, flags):
    _, text = run(model(QWEN3_30B | NVFP4 | fields, **flags), hardware="h200")
    blocks = re.findall(r"```text\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    shown = [line.strip() for block in blocks if "h200" in block for line in block.splitlines()]
    assert len(shown) > 10
    printed = {line.strip() for line in text.splitlines()}
    assert [line for line in shown if line != "..." and line not in printed] == []


def test_what_computes_gated_deltanet_is_explained(model):
    published = json.loads((PUBLISHED / "qwen3.5-35b-a3b.json").read_text())
    _, text = run(model(published), hardware="h200")
    assert "Gated DeltaNet in 30 layers, with a state per request: triton" in text.splitlines()


@pytest.mark.parametrize(
    ("backend", "dtype", "said"),
    [
        (
            "auto",
            "float16",
            "triton, and flash-attn-4 for prompts of 512 tokens or more (faster from there on, as measured)",
        ),
        ("auto", "bfloat16", "triton"),
        ("triton", "float16", "triton"),
        ("flash-attn-4", "bfloat16", "triton, and flash-attn-4 for prompts"),
        ("torch", "bfloat16", "torch"),
    ],
)
def test_what_computes_attention_is_explained(model, backend: str, dtype: str, said: str):
    config = model(QWEN3_30B, attention_backend=backend, dtype=dtype)
    code, text = run(config, hardware="h200")
    lines = text.splitlines()
    assert code == 0
    assert f"attention over whole contexts in 48 layers: {said}" in lines
    eager = "decoding runs eagerly: --attention-backend torch computes outside of graphs"
    assert (eager in lines) == (backend == "torch")
    (group,) = json.loads(run(config, hardware="h200", as_json=True)[1])["kv"]["groups"]
    assert group["backend"] == ("torch" if backend == "torch" else "triton")
    assert group["prompt_tokens"] == (512 if "512" in said else 0)


@pytest.mark.parametrize(
    ("hardware", "flags", "limit", "remedy"),
    [
        ("a100", {}, "flash-attn-4 runs on GPUs of compute capability 9.x and 10.x", "use such a GPU"),
        (
            "h200",
            {"dtype": "float32"},
            "flash-attn-4 computes in bfloat16, float16, not float32",
            "use --dtype",
        ),
        ("h200", {"deterministic": True}, "is not batch-invariant", "use --attention-backend auto or triton"),
    ],
)
def test_attention_that_was_asked_for_is_refused_with_remedies(model, hardware, flags, limit, remedy):
    config = model(QWEN3_30B, attention_backend="flash-attn-4", **flags)
    code, text = run(config, hardware=hardware)
    assert code == 2
    assert limit in text
    assert remedy in text
