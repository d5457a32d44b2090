"""A made-up checkpoint has the files of a real one, and runs."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.checkpoint.writers import MIXED, Written, save
from tests.models.families import FAMILIES, build
from tests.models.test_deepseek_v4 import build_published as build_v4
from tests.tiny import QWEN3_MOE, write_model
from tools.random_checkpoint import FORMATS, POOL_BYTES, QWEN3_30B, write
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


def test_attention_is_fp8_where_experts_are(tmp_path: Path):
    write_model(tmp_path / "bf16", dtype=torch.bfloat16)
    quantize(tmp_path / "bf16", tmp_path / "fp8", "fp8")
    write(tmp_path / "random", CONFIG, format="fp8")
    ours, real = tensors(tmp_path / "random"), tensors(tmp_path / "fp8")
    assert {name: at for name, at in ours.items() if "self_attn" not in name or "norm" in name} == {
        name: at for name, at in real.items() if "self_attn" not in name or "norm" in name
    }
    for name, (shape, dtype) in real.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            assert dtype == "BF16"
            assert ours[name] == (shape, "F8_E4M3")
            assert ours[f"{name}_scale_inv"] == ([-(-n // 128) for n in shape], "F32")
    kept = json.loads((tmp_path / "random/config.json").read_text())["quantization_config"]
    assert not any("_proj" in name for name in kept["modules_to_not_convert"])


def test_nvfp4_experts_next_to_fp8_blocks(tmp_path: Path):
    built = build(tmp_path / "mixed", FAMILIES["deepseek_v3"], num_nextn_predict_layers=0)
    written = {name: t.bfloat16() for name, t in built.tensors.items() if "layers.3." not in name}
    mixed = Written(built.folder, built.model, {name: t.float() for name, t in written.items()})
    released = dict(mixed.weights)
    MIXED["modelopt-fp8-nvfp4"](mixed, released, True)
    save(built.folder, released)
    write(tmp_path / "random", built.config, format="nvfp4-fp8")
    ours, real = tensors(tmp_path / "random"), tensors(tmp_path / "mixed")
    assert {name: shape for name, (shape, _) in ours.items()} == {n: shape for n, (shape, _) in real.items()}
    packed = {"U8", "F8_E4M3"}
    assert {n: t for n, (_, t) in ours.items() if t in packed} == {
        n: t for n, (_, t) in real.items() if t in packed
    }
    kinds = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("random", "mixed")]
    layers = [kind["quantization_config"]["quantized_layers"] for kind in kinds]
    assert layers[0] == layers[1]


def test_no_two_tokens_share_a_row_of_the_head(tmp_path: Path):
    """With rows from a repeated pool, thousands of ids would always have the same logit."""
    config = CONFIG | {
        "vocab_size": 70_000,
        "eos_token_id": 69_999,
        "hidden_size": 256,
        "num_hidden_layers": 1,
    }
    assert POOL_BYTES // 4 < 70_000 * 256  # more values than the pool has
    write(tmp_path / "random", config, format="bf16")
    weights = load_file(tmp_path / "random/model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert len(torch.unique(weights[name].view(torch.int16), dim=0)) == 70_000


def test_gpt_oss_has_the_tensors_of_a_checkpoint_in_mxfp4(tmp_path: Path):
    built = build(tmp_path / "bf16", FAMILIES["gpt_oss"])
    quantize(tmp_path / "bf16", tmp_path / "mxfp4", "mxfp4")
    write(tmp_path / "random", built.config)
    ours, real = tensors(tmp_path / "random"), tensors(tmp_path / "mxfp4")
    assert {name: shape for name, (shape, _) in ours.items()} == {n: shape for n, (shape, _) in real.items()}
    assert {dtype for name, (_, dtype) in ours.items() if name.endswith(("_blocks", "_scales"))} == {"U8"}


def test_deepseek_v4_has_the_tensors_of_a_release(tmp_path: Path):
    built = build_v4(tmp_path / "bf16")
    write(tmp_path / "random", built.config)
    ours, real = tensors(tmp_path / "random"), tensors(tmp_path / "bf16")
    fp4 = {name for name, (_, dtype) in ours.items() if dtype == "I8"}
    assert fp4 == {name for name in real if ".ffn.experts." in name}
    fp8 = {name for name, (_, dtype) in ours.items() if dtype == "F8_E4M3"}
    assert {name.split(".", 2)[2] for name in fp8} == {
        *(f"attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")),
        *(f"ffn.shared_experts.{name}.weight" for name in ("w1", "w2", "w3")),
    }
    scales = {name.removesuffix("weight") + "scale" for name in fp4 | fp8}
    assert {name for name, (_, dtype) in ours.items() if dtype == "F8_E8M0"} == scales
    shapes = {name: shape for name, (shape, _) in real.items() if not name.startswith("mtp.")}
    shapes |= {name: [shapes[name][0], shapes[name][1] // 2] for name in fp4}
    assert {name: shape for name, (shape, _) in ours.items() if name not in scales} == shapes


@pytest.mark.parametrize(
    ("family", "format"),
    [(None, "nvfp4-fp8"), ("gpt_oss", "mxfp4"), ("deepseek_v4", "mxfp4")]
    + [
        pytest.param(family, format, marks=pytest.mark.more)
        for family, format in (
            *((None, format) for format in FORMATS if format != "nvfp4-fp8"),
            ("qwen3_5_moe", "nvfp4"),
            ("glm4_moe_lite", "fp8"),
            ("deepseek_v3", "nvfp4-fp8"),
            ("deepseek_v3", "mxfp4"),
        )
    ],
)
def test_it_runs_and_speaks(tmp_path: Path, family: str | None, format: str):
    config = CONFIG
    if family:
        shape = tmp_path / "shape"
        config = (build_v4(shape) if family == "deepseek_v4" else build(shape, FAMILIES[family])).config
    written = {name: value for name, value in config.items() if name != "quantization_config"}
    before = copy.deepcopy(written)
    write(tmp_path / "random", written, format=format, seed=1)
    assert written == before
    with LLM(str(tmp_path / "random"), device="cpu", num_threads=1, load_progress=False) as llm:
        (first,) = llm.generate("Hello", SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0))
    assert len(set(first.token_ids)) > 2
    assert first.text
    assert all(entry.logprob < -0.1 for entry in first.logprobs)  # nothing is certain
