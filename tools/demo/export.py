"""Between the training model's parameters and files: its own shards, and a Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnout.formats import nvfp4

from .model import DemoModel, Shape
from .released import HybridShape, LatentShape, ReleasedModel
from .released_v4 import StreamModel, StreamShape

SHARDS = 3
ARCHITECTURES = {
    "qwen3_moe": Shape,
    "glm4_moe_lite": LatentShape,
    "qwen3_next": HybridShape,
    "deepseek_v4": StreamShape,
}
# What releases keep in float32.
EXACT = ("A_log", "dt_bias", "e_score_correction_bias", "gate.bias", "attn_sink", "_fn", "_base", "_scale")

TrainingModel = DemoModel | ReleasedModel


def make_model(architecture: str, dtype: torch.dtype, **sizes: Any) -> TrainingModel:
    """sizes: of its shape, where they are not the default."""
    shape = ARCHITECTURES[architecture](**sizes)
    if isinstance(shape, Shape):
        return DemoModel(shape, dtype)
    return (StreamModel if isinstance(shape, StreamShape) else ReleasedModel)(shape, dtype)


def save_parameters(model: TrainingModel, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """The parameters in SHARDS files of about equal size: `parameters-{i}.safetensors`."""
    pieces = {
        f"{name}/{i}": _rounded(name, part, dtype).contiguous().cpu()
        for name, p in model.state_dict().items()
        for i, part in enumerate(p.chunk(SHARDS) if p.ndim > 2 else [p])
    }
    for i in range(SHARDS):
        shard = {k: v for k, v in pieces.items() if k.endswith(f"/{i}")}
        save_file(shard, folder / f"parameters-{i}.safetensors")


def load_parameters(model: TrainingModel, folder: Path) -> None:
    pieces: dict[str, list[Tensor]] = {}
    for i in range(SHARDS):
        for name, part in load_file(folder / f"parameters-{i}.safetensors").items():
            pieces.setdefault(name.rpartition("/")[0], []).append(part)
    model.load_state_dict({name: torch.cat(parts) for name, parts in pieces.items()})


def write_folder(model: TrainingModel, folder: Path, end_id: int, pad_id: int) -> None:
    """config.json, generation_config.json and model.safetensors in bfloat16, as the architecture is published.

    The tokenizer's files are expected to be there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(model.shape) if isinstance(model, DemoModel) else model.shape.config()
    ends = {"bos_token_id": None, "eos_token_id": end_id, "pad_token_id": pad_id}
    write_json(folder / "config.json", config | ends)
    generation = {"do_sample": False, "eos_token_id": end_id, "pad_token_id": pad_id}
    write_json(folder / "generation_config.json", generation)
    named = _named(model) if isinstance(model, DemoModel) else model.named()
    tensors = {name: _rounded(name, t, torch.bfloat16).contiguous().clone() for name, t in named}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.float() if name.endswith(EXACT) else tensor.to(dtype)


def decoded(nvfp4_folder: Path, out: Path) -> None:
    """Write the NVFP4 checkpoint as a bf16 one, for what wants weights that are not quantised."""
    out.mkdir(parents=True)
    for path in nvfp4_folder.iterdir():
        if path.suffix in (".json", ".jinja") and path.name not in ("config.json", "hf_quant_config.json"):
            shutil.copyfile(path, out / path.name)
    config = json.loads((nvfp4_folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    write_json(out / "config.json", config)
    stored = load_file(nvfp4_folder / "model.safetensors")
    tensors = {}
    for name, value in stored.items():
        if f"{name}_scale" in stored:
            scale, total = stored[f"{name}_scale"], stored[f"{name}_scale_2"]
            tensors[name] = nvfp4.decode(value, scale, total).to(torch.bfloat16)
        elif not name.endswith((".weight_scale", ".weight_scale_2", ".input_scale")):
            tensors[name] = value
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _config(s: Shape) -> dict:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.expert_width * s.top_k,
        "max_position_embeddings": s.max_positions,
        "mlp_only_layers": [],
        "moe_intermediate_size": s.expert_width,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads,
        "num_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": s.eps,
        "rope_theta": s.rope_theta,
        "router_aux_loss_coef": 0.01,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": s.vocab,
    }


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "router": "mlp.gate",
}


def _named(model: DemoModel) -> list[tuple[str, Tensor]]:
    """Every tensor under its published name."""
    state = model.state_dict()
    named = [("model.embed_tokens.weight", state["embed"]), ("model.norm.weight", state["final_norm"])]
    for layer in range(model.shape.layers):
        prefix = f"model.layers.{layer}"
        named += [(f"{prefix}.{new}.weight", state[old][layer]) for old, new in _LAYER_NAMES.items()]
        for expert in range(model.shape.experts):
            for name in ("gate", "up", "down"):
                key = f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"
                named.append((key, state[name][layer, expert]))
    return named


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
