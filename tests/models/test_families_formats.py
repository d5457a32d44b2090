"""Families from quantised checkpoints, as published and as `turnout quantize` writes them.

The reference is transformers' model with the dequantised weights of `tests/checkpoint/packing.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.checkpoint import packing
from tests.checkpoint.writers import FORMATS, MIXED, Tensors, Written, edit_config, save, stack_experts
from tests.models.families import FAMILIES, Built, build, one_by_one, transposed, write
from tests.models.running import load
from tests.models.test_formats import BOUND, relative, run
from tests.models.test_formats import IDS as PROMPT
from tests.models.test_logits import reference
from turnout.checkpoint import CheckpointError
from turnout.checkpoint.quantize import quantize

# What publishers name as not converted, where that is not every module by its name.
NOT_CONVERTED = {("minimax_m2", "fp8"): ["gate", "e_score_correction_bias", "lm_head"]}
NAMES = [name for name in FAMILIES if name != "gpt_oss"]  # whose biased experts test_gpt_oss.py has
PUBLISHED = [(name, format) for name in NAMES for format in FAMILIES[name].formats]
# One of each way to store experts in make test; the others with make test-more.
QUICK = ("minimax_m2", "glm4_moe", "llama4")


@pytest.mark.parametrize(("name", "format"), PUBLISHED)
def test_as_published(name: str, format: str, tmp_path: Path) -> None:
    """Attention, dense and shared MLPs quantised too; experts one by one, by the family's names."""
    family = FAMILIES[name]
    if name in ("qwen3_vl_moe", "qwen3_5_moe") and format != "bf16":
        family = replace(family, release=one_by_one)
    if name == "llama4" and format != "bf16":  # as llm-compressor writes it, from modules of one expert each
        family = replace(family, release=lambda t: FAMILIES[name].release(one_by_one(transposed(t))))
    built = build(tmp_path / "quantised", family)
    tensors = dict(built.tensors)
    written = Written(built.folder, built.model, dict(tensors))
    (FORMATS | MIXED)[format](written, tensors, True)
    save(built.folder, tensors)
    if (name, format) in NOT_CONVERTED:
        with edit_config(built.folder) as config:
            config["quantization_config"]["modules_to_not_convert"] = NOT_CONVERTED[name, format]
    theirs = dequantised(built, written.weights, tmp_path / "plain")
    assert relative(run(built.folder, moe_activation_dtype="bf16"), reference(theirs, PROMPT)) <= BOUND


KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (f"{KV_A}.weight_scale_inv", None, "is missing.*stored as FP8 in blocks"),
        # 144 rows are a block and an eighth: as of the 576 of DeepSeek-V3 the last block is not whole.
        (f"{KV_A}.weight_scale_inv", torch.ones(1, 1), r"wrong shape.*expected \[2, 1\], found \[1, 1\]"),
        (BIAS, torch.ones(16, dtype=torch.int64), "wrong dtype.*found int64"),
        (BIAS, None, "is missing"),
    ],
    ids=["no scale", "a block too few", "wrong type", "no bias"],
)
def test_damaged_latent_layers(name: str, value: Tensor | None, told: str, tmp_path: Path) -> None:
    built = build(tmp_path, FAMILIES["deepseek_v3"], kv_lora_rank=136)
    tensors = dict(built.tensors)
    FORMATS["fp8"](Written(tmp_path, built.model, dict(tensors)), tensors, True)
    assert name in tensors
    save(tmp_path, {n: t for n, t in tensors.items() if n != name} | ({} if value is None else {name: value}))
    with pytest.raises(CheckpointError, match=f"(?s){re.escape(name)}.*{told}"):
        load(tmp_path)


def dequantised(built: Built, weights: Tensors, folder: Path) -> torch.nn.Module:
    """transformers' model with these weights, by names on disk."""
    make = AutoModelForCausalLM if built.family.text else AutoModelForImageTextToText
    if built.family.text or built.family.model_type == "kimi_k25":
        write(folder, built.config, weights)
        return make.from_pretrained(folder, dtype=torch.float32)
    for prefix, (gate, up, down) in stack_experts(weights).items():  # as transformers reads them
        turned = built.family.model_type in ("qwen3_vl_moe", "llama4")
        both = torch.cat((gate, up), dim=1)
        weights[f"{prefix}.gate_up_proj"] = both.transpose(1, 2) if turned else both
        weights[f"{prefix}.down_proj"] = down.transpose(1, 2) if turned else down
    write(folder, built.config, weights)
    return make.from_pretrained(folder, dtype=torch.float32)


def nvfp4(gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    both = max(float(gate.abs().max()), float(up.abs().max()))
    return (
        packing.nvfp4(gate, both)[1],
        packing.nvfp4(up, both)[1],
        packing.nvfp4(down, float(down.abs().max()))[1],
    )


def mxfp4(*matrices: Tensor) -> tuple[Tensor, ...]:
    return tuple(packing.mxfp4(matrix)[1] for matrix in matrices)


def fp8(*matrices: Tensor) -> tuple[Tensor, ...]:
    return tuple(packing.fp8(matrix)[1] for matrix in matrices)


@pytest.mark.parametrize("format", [nvfp4, mxfp4, fp8], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.more) for name in NAMES]
)
def test_as_quantize_writes_it(name: str, format, tmp_path: Path) -> None:
    built = build(tmp_path / "source", FAMILIES[name])
    quantize(built.folder, tmp_path / "out", format.__name__)
    plain = reference(built.model, PROMPT)
    for key, tensor in built.model.state_dict().items():
        if key.endswith(".experts.gate_up_proj"):
            round_experts(tensor, built.model.state_dict()[key.replace("gate_up", "down")], name, format)
    theirs = reference(built.model, PROMPT)
    # The rounding shows, less where the config clamps experts' outputs to little.
    assert relative(theirs, plain) > (2 if name == "deepseek_v4" else 10) * BOUND
    assert relative(run(tmp_path / "out", moe_activation_dtype="bf16"), theirs) <= BOUND


def round_experts(gate_up: Tensor, down: Tensor, name: str, format) -> None:
    """In place; Llama-4's matrices are transposed in transformers' model too."""
    turned = name == "llama4"
    for wide, narrow in zip(gate_up, down, strict=True):
        gate, up = (wide.T if turned else wide).chunk(2)
        parts = format(gate.contiguous(), up.contiguous(), (narrow.T if turned else narrow).contiguous())
        both = torch.cat(parts[:2])
        wide.copy_(both.T if turned else both)
        narrow.copy_(parts[2].T if turned else parts[2])
