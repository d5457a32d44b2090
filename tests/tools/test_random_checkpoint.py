"""A made-up checkpoint has the files of a real one, and runs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from tests.tiny import QWEN3_MOE, write_model
from tools.random_checkpoint import QWEN3_30B, write
from turnout import LLM, SamplingParams
from turnout.checkpoint.quantize import quantize

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok")
CONFIG = QWEN3_30B | {size: QWEN3_MOE[size] for size in SIZES} | {"eos_token_id": 383}


def tensors(folder: Path) -> dict[str, tuple[list[int], str]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def test_tensors_are_those_of_transformers_quantised(tmp_path: Path):
    write_model(tmp_path / "bf16", dtype=torch.bfloat16)
    experts = [
        f"model.layers.{i}.mlp.experts.{e}"
        for i in range(CONFIG["num_hidden_layers"])
        for e in range(CONFIG["num_experts"])
    ]
    quantize(tmp_path / "bf16", tmp_path / "nvfp4", "nvfp4", calibration=dict.fromkeys(experts, (1.0, 1.0)))
    size = write(tmp_path / "random", CONFIG)
    assert tensors(tmp_path / "random") == tensors(tmp_path / "nvfp4")
    for file, field in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        ours, real = (json.loads((tmp_path / name / file).read_text())[field] for name in ("random", "nvfp4"))
        assert ours == real
    assert 0 < (tmp_path / "random/model.safetensors").stat().st_size - size < 2e5


def test_it_runs_and_speaks(tmp_path: Path):
    write(tmp_path / "random", CONFIG, seed=1)
    with LLM(str(tmp_path / "random"), device="cpu", num_threads=1, load_progress=False) as llm:
        (first,) = llm.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0))
    assert len(set(first.token_ids)) > 2
    assert first.text
    assert all(entry.logprob < -0.1 for entry in first.logprobs)  # nothing is certain
