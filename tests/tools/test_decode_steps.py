"""The tool measures an engine that runs: each load gets its row."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import httpx
import pytest
import torch

from tests.models.test_families_describe import PUBLISHED
from tests.serving import tiny_config
from tools import decode_steps, random_checkpoint
from tools.step_floor import work_of_step
from turnout.errors import UserError
from turnout.server.launch import ServerProcess


def test_each_load_has_a_row(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flags = ["--device", "cpu", "--requests", "1", "3", "--eager", "--prefill", "64x2"]
    file = tmp_path / "steps.json"
    monkeypatch.setattr(sys, "argv", ["decode_steps", str(tiny_folder), *flags, "--output", str(file)])
    monkeypatch.setenv("TURNOUT_CONTEXT_LENGTH", "256")
    decode_steps.main()
    loaded, *rows = json.loads(file.read_text())["rows"]
    assert loaded["layers"] == 2
    assert [row["requests"] for row in rows] == [1, 3, 2]
    assert all(row["step_ms"] > 0 for row in rows[:2])
    read = [row["floor_share"] * row["step_ms"] * decode_steps.BYTES_PER_S / 1e3 for row in rows[:2]]
    assert 0 < read[0] < read[1] < 1.5 * loaded["planned_bytes"]
    assert rows[2]["tokens_per_s"] > 0


def test_contexts_that_are_not_computed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Decode steps compute every layer over caches full of noise, and prompts before them none."""
    options = Namespace(device="cpu", requests=[2], eager=[], prefill=[], context=200)
    monkeypatch.setenv("TURNOUT_CONTEXT_LENGTH", "512")
    bench = decode_steps.Bench(str(tiny_folder), options)
    core = bench._llm._open()
    decode_steps.fill(core._forward._attention)
    keys = core._forward._attention.groups[0].cache
    noise, layers = keys.clone(), core._forward._model.layers_begun
    with decode_steps.skipped(core):
        decode_steps._add(core, decode_steps._prompts(2, 200), 8)
        while core.synced is None or core.synced.phase != "decode":
            core.step()
    assert core._forward._model.layers_begun == layers
    assert torch.equal(keys, noise)
    core.step()
    assert core._forward._model.layers_begun == layers + 2
    assert len((keys != noise).any((0, 1, 3, 4)).unflatten(0, (-1, 16)).any(1).nonzero()) == 2  # pages
    core.abort([f"bench-{i}" for i in range(2)])
    found = bench._steps(core, 2)
    more = 2 * (200 - 64) * core._forward._attention.cache_bytes / (noise.shape[2] * decode_steps.BYTES_PER_S)
    longer = found["floor_share"] * found["step_ms"] / 1e3
    work = work_of_step(bench._llm.info(), core._forward._attention, 2, 64 + decode_steps.STEPS // 2)
    shorter = sum(part.nbytes for part in work.values()) / decode_steps.BYTES_PER_S
    assert longer - shorter == pytest.approx(more, rel=1e-3)
    bench._llm.close()


def test_all_requests_decode_in_what_is_measured(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """However many steps their prompts would have taken, in which the first would have ended."""
    monkeypatch.setenv("TURNOUT_CONTEXT_LENGTH", "512")
    monkeypatch.setenv("TURNOUT_MAX_PREFILL_TOKENS", "16")
    options = Namespace(device="cpu", requests=[12], eager=[], prefill=[], context=300)
    bench = decode_steps.Bench(str(tiny_folder), options)
    core = bench._llm._open()
    assert bench._steps(core, 12)["step_ms"] > 0
    monkeypatch.setattr(decode_steps, "LENGTH", 20)
    with pytest.raises(
        UserError, match="12 requests were to decode together, and the last step had 0 tokens"
    ):
        bench._steps(core, 12)
    bench._llm.close()


def test_kernels_belong_to_parts():
    names = (
        "attend_latent_span",
        "expert_gemm_fp8_specialised",
        "nvjet_tst_64x8",
        "score_tile",
        "step_columns",
        "layer_norm_gated_fwd_kernel",
        "norm_rows",
        "elementwise",
    )
    parts = ["attention", "experts", "dense products", "indexer", "DeltaNet", "DeltaNet", "norms", "rest"]
    assert [decode_steps.part_of(name) for name in names] == parts


@pytest.mark.more
def test_random_gpt_oss_is_measured_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of the published configuration with tiny layers, as tools.random_checkpoint writes it from there."""
    folder, file = tmp_path / "gpt-oss", tmp_path / "steps.json"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 512, "num_local_experts": 8}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "eos_token_id": 511}
    tiny = [word for name, value in sizes.items() for word in ("--set", name, str(value))]
    flags = [str(folder), "--config", str(PUBLISHED / "gpt-oss-120b.json"), "--num-layers", "4", *tiny]
    monkeypatch.setattr(sys, "argv", ["random_checkpoint", *flags, "--set", "pad_token_id", "null"])
    random_checkpoint.main()
    flags = ["--device", "cpu", "--requests", "1", "--eager", "--prefill", "64x1", "--output", str(file)]
    monkeypatch.setattr(sys, "argv", ["decode_steps", str(folder), *flags])
    monkeypatch.setenv("TURNOUT_CONTEXT_LENGTH", "256")
    decode_steps.main()
    loaded, *rows = json.loads(file.read_text())["rows"]
    assert loaded["layers"] == 4
    assert [row["requests"] for row in rows] == [1, 1]
    server = ServerProcess(tiny_config(folder), show=False)
    try:
        asked = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{server.wait_ready()}/completions", json=asked, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 8
    finally:
        assert server.stop() == 0, server.last_lines()
