"""`quantize` when things go wrong: the output is whole or absent, and every refusal says what to do."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import write_model
from turnout.checkpoint import CheckpointError, open_checkpoint
from turnout.checkpoint import writer as writing
from turnout.checkpoint.quantize import quantize
from turnout.checkpoint.writer import Entry, ShardWriter
from turnout.errors import UserError

FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16")
EXPERT = "model.layers.0.mlp.experts.3"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    write_model(folder, dtype=torch.bfloat16)
    return folder


@pytest.fixture
def source(original, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "source"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, drop: str = "", **changes: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if k != drop}, folder / "model.safetensors")


def assert_nothing_written(out: Path) -> None:
    assert not list(out.parent.glob(f"{out.name}*"))


def assert_does_not_load(folder: Path) -> None:
    with pytest.raises(UserError):
        open_checkpoint(folder)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(folder)
    assert not list(folder.glob("*.safetensors"))
    assert not (folder / "config.json").exists()


def quantize_and_die(source: Path, out: Path, format: str, share: float, how: signal.Signals) -> int:
    """Run `quantize` in a child that sends itself a signal midway; returns how the child ended."""

    def progress(name: str, done: int, total: int) -> None:
        if done >= share * total:
            os.kill(os.getpid(), how)

    def child() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)  # threads do not survive a fork
        quantize(source, out, format, progress=progress, shard_bytes=40_000)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(timeout=60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.parametrize(
    ("format", "share", "how"),
    [
        ("nvfp4", 0.5, signal.SIGKILL),
        ("mxfp4", 1.0, signal.SIGKILL),
        ("fp8", 0.3, signal.SIGTERM),
        ("nvfp4", 0.7, signal.SIGINT),
    ],
)
def test_a_killed_run_leaves_nothing_that_loads(original, tmp_path, format, share, how):
    """Whatever the signal and the moment; the next run starts afresh and succeeds."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    exit_code = quantize_and_die(original, out, format, share, how)
    assert not out.exists()
    if how == signal.SIGINT:  # Python had the chance to clean up
        assert exit_code == 1
        assert not partial.exists()
    else:
        assert exit_code == -how
        assert list(partial.iterdir())
        assert_does_not_load(partial)
    quantize(original, out, format)
    assert not partial.exists()
    quantize(original, tmp_path / "undisturbed", format)
    ours, undisturbed = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (out, tmp_path / "undisturbed")
    )
    assert ours == undisturbed


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_any_exception_removes_what_was_written(original, tmp_path, error):
    def progress(name: str, done: int, total: int) -> None:
        if done > total / 2:
            assert list((tmp_path / "out.partial").iterdir())
            raise error

    with pytest.raises(error):
        quantize(original, tmp_path / "out", "mxfp4", progress=progress)
    assert_nothing_written(tmp_path / "out")


def test_a_failure_while_the_last_files_are_written_leaves_nothing(original, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("turnout.checkpoint.quantize.write_json", full)
    with pytest.raises(UserError, match=r"cannot write .*out: No space left on device"):
        quantize(original, tmp_path / "out", "nvfp4")
    assert_nothing_written(tmp_path / "out")


def test_a_disk_that_fills_up_is_a_user_error(original, tmp_path, monkeypatch):
    written = 0

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal written
        written += 1
        if written > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data)

    monkeypatch.setattr(writing.os, "pwrite", pwrite)
    with pytest.raises(UserError, match=r"^cannot write .*out: No space left on device"):
        quantize(original, tmp_path / "out", "nvfp4")
    assert_nothing_written(tmp_path / "out")


def test_short_writes_are_continued(original, tmp_path, monkeypatch):
    """The system may take fewer bytes than offered."""
    real = os.pwrite
    monkeypatch.setattr(writing.os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    quantize(original, tmp_path / "short", "fp8")
    monkeypatch.undo()
    quantize(original, tmp_path / "whole", "fp8")
    short, whole = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("short", "whole"))
    assert short == whole


def test_too_little_space_is_refused_before_anything_is_computed(original, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"out needs 0\.00 GB, but its disk has 0\.00 GB free; make room"):
        quantize(original, tmp_path / "out", "nvfp4", progress=lambda *_: pytest.fail("something was read"))
    assert_nothing_written(tmp_path / "out")


def test_two_runs_do_not_write_the_same_folder(original, tmp_path):
    def progress(name: str, done: int, total: int) -> None:
        if done == total:
            with pytest.raises(UserError, match=r"out is being written by another run"):
                quantize(original, tmp_path / "out", "fp8")

    quantize(original, tmp_path / "out", "mxfp4", progress=progress)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.quantization.format == "mxfp4"


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_an_existing_output_is_refused_and_left_alone(original, tmp_path, kind):
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "precious").write_text("data")
    elif kind == "file":
        out.write_text("data")
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"out exists already; name a new folder, or remove it first"):
        quantize(original, out, "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    if kind == "folder":
        assert (out / "precious").read_text() == "data"


def test_an_output_that_cannot_be_written_is_a_user_error(original, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^cannot write .*file/out: Not a directory"):
        quantize(original, tmp_path / "file" / "out", "fp8")


def test_missing_parents_are_made(original, tmp_path):
    quantize(original, tmp_path / "a" / "b" / "out", "fp8")
    with open_checkpoint(tmp_path / "a" / "b" / "out") as checkpoint:
        assert checkpoint.quantization.format == "fp8"


@pytest.mark.parametrize("first", ["nvfp4", "mxfp4", "fp8"])
@pytest.mark.parametrize("second", ["nvfp4", "bf16"])
def test_a_quantised_source_is_refused_by_name(original, tmp_path, first, second):
    quantize(original, tmp_path / "once", first)
    method = {"nvfp4": "modelopt W4A16_NVFP4", "mxfp4": "mxfp4", "fp8": "fp8"}[first]
    with pytest.raises(UserError, match=rf"once is quantised already \({method}\); .* starts from bf16"):
        quantize(tmp_path / "once", tmp_path / "twice", second)
    assert_nothing_written(tmp_path / "twice")


def test_unknown_formats_are_refused(original, tmp_path):
    with pytest.raises(
        UserError, match="unknown format 'int3'; quantize writes nvfp4, mxfp4, fp8, int4, bf16"
    ):
        quantize(original, tmp_path / "out", "int3")


def refuses(source: Path, format: str, message: str) -> None:
    out = source.parent / "out"
    with pytest.raises(UserError, match=message):
        quantize(source, out, format)
    assert_nothing_written(out)


def test_a_source_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", "fp8", r"config\.json: is missing")
    refuses(tmp_path / "nowhere", "fp8", "nowhere")


def test_a_model_without_experts_is_refused(source):
    tensors = load_file(source / "model.safetensors")
    dense = {k: v for k, v in tensors.items() if ".experts." not in k}
    save_file(dense, source / "model.safetensors")
    refuses(source, "mxfp4", r"has no routed experts to quantise: expected .*, found none")
    stacked = dense | {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(8, 64, 64)}
    save_file(stacked, source / "model.safetensors")
    refuses(source, "mxfp4", r"tensor model\.layers\.0\.mlp\.experts\.down_proj: is missing")


def test_a_missing_expert_tensor_is_named(source):
    edit_tensors(source, drop=f"{EXPERT}.up_proj.weight")
    refuses(source, "nvfp4", rf"tensor {EXPERT}\.up_proj\.weight: is missing.*All experts of a layer")


def test_a_missing_last_expert_is_noticed(source):
    tensors = load_file(source / "model.safetensors")
    fewer = {k: v for k, v in tensors.items() if not k.startswith("model.layers.1.mlp.experts.7.")}
    save_file(fewer, source / "model.safetensors")
    refuses(source, "nvfp4", r"layers\.1\.mlp\.experts has the wrong number of experts: expected 8, found 7")


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8"])
def test_a_wrong_shape_or_dtype_is_named(source, format):
    name = f"{EXPERT}.down_proj.weight"
    edit_tensors(source, **{name: torch.zeros(64, 16, dtype=torch.bfloat16)})
    refuses(source, format, rf"tensor {name}: has the wrong shape: expected \[64, 32\], found \[64, 16\]")
    edit_tensors(source, **{name: torch.zeros(64, 32, dtype=torch.int8)})
    refuses(source, format, rf"tensor {name}: has the wrong dtype: expected bfloat16 .*, found int8")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("name", [f"{EXPERT}.gate_proj.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_weights_that_are_not_finite_are_refused_by_tensor_and_file(source, format, bad, name):
    tensor = load_file(source / "model.safetensors")[name]
    tensor[1, 2] = bad
    edit_tensors(source, **{name: tensor})
    refuses(source, format, rf"model\.safetensors: tensor {name}: is damaged: expected finite numbers")


@pytest.mark.parametrize(
    ("format", "inner", "multiple"), [("nvfp4", 24, 16), ("mxfp4", 48, 32)], ids=["nvfp4", "mxfp4"]
)
def test_sizes_that_leave_a_group_open_are_refused_before_writing(tmp_path, format, inner, multiple):
    write_model(tmp_path / "source", dtype=torch.bfloat16, moe_intermediate_size=inner, num_hidden_layers=1)
    refuses(
        tmp_path / "source",
        format,
        rf"experts\.0\.down_proj\.weight \[64, {inner}\]: {format} needs columns in multiples of {multiple}",
    )


def test_a_truncated_source_is_refused(source):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuses(source, "fp8", r"model\.safetensors: .*is truncated")


def test_a_source_that_shrinks_while_it_is_read_is_an_error(source, tmp_path):
    def progress(name: str, done: int, total: int) -> None:
        os.truncate(source / "model.safetensors", 10_000)

    with pytest.raises(CheckpointError, match="is truncated"):
        quantize(source, tmp_path / "out", "fp8", progress=progress)
    assert_nothing_written(tmp_path / "out")


def test_calibration_that_does_not_fit_is_refused(original, tmp_path):
    out = tmp_path / "out"
    good = {f"model.layers.{i}.mlp.experts.{e}": (1.0, 1.0) for i in range(2) for e in range(8)}
    with pytest.raises(UserError, match="activation scales belong to nvfp4; mxfp4 has none"):
        quantize(original, out, "mxfp4", calibration=good)
    with pytest.raises(UserError, match=r"names 'layers\.0', .* called 'model\.layers\.\d\.mlp\.experts\.0'"):
        quantize(original, out, "nvfp4", calibration=good | {"layers.0": (1.0, 1.0)})
    for bad in (
        {},
        good | {"model.layers.1.mlp.experts.5": (float("nan"), 1.0)},
        dict.fromkeys(good, (0, 1)),
    ):
        with pytest.raises(
            UserError, match=r"calibration of model\.layers\.\d\.mlp\.experts gave input maxima"
        ):
            quantize(original, out, "nvfp4", calibration=bad)
    assert_nothing_written(out)


def test_the_writer_holds_its_caller_to_what_was_announced(tmp_path):
    a, b = Entry("a", torch.float32, (2, 3)), Entry("b", torch.uint8, (4,))
    writer = ShardWriter(tmp_path, [[a], [b]], shard_bytes=24)
    with pytest.raises(ValueError, match=r"announced, but torch.float32 \(3, 2\) is written"):
        writer.write("a", torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"announced, but torch.float16 \(2, 3\) is written"):
        writer.write("a", torch.zeros(2, 3).half())
    writer.write("a", torch.zeros(1, 3), first=1)
    with pytest.raises(ValueError, match="2 tensors are not complete, the first being a"):
        writer.finish()
    writer.write("a", torch.zeros(1, 3))
    writer.write("b", torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="is finished; each tensor is written once"):
        writer.write("a", torch.zeros(2, 3))


MEASURED = """
import resource, sys
from pathlib import Path
from turnout.checkpoint.quantize import quantize

source, out, format = sys.argv[1:]
quantize(Path(source) / "small", Path(out) / "small", format)  # imports and allocations of any size
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize(Path(source) / "large", Path(out) / "large", format)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    """2 and 32 experts of 3 MB, stacked in the output: held is one of them with its float32 copies."""
    for name, experts in (("small", 2), ("large", 32)):
        folder = tmp_path / name
        folder.mkdir()
        shapes = {"gate_proj": (512, 1024), "up_proj": (512, 1024), "down_proj": (1024, 512)}
        tensors = {
            f"model.layers.0.mlp.experts.{e}.{p}.weight": torch.ones(shape, dtype=torch.bfloat16)
            for e in range(experts)
            for p, shape in shapes.items()
        }
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"num_experts": experts}))
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), str(tmp_path / "out"), "mxfp4"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 16_000  # kB
