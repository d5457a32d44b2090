"""Configs for these tests, as transformers writes them and as the model hubs hold them."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.engine import planned
from tests.tiny import QWEN2_MOE, QWEN3_MOE

BASES = {"qwen2": QWEN2_MOE, "qwen3": QWEN3_MOE}

# Qwen/Qwen3-30B-A3B, and the fields that Qwen3-Coder-30B-A3B adds to it.
QWEN3_30B = planned.QWEN3_30B | {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "initializer_range": 0.02,
    "max_window_layers": 48,
    "output_router_logits": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}
QWEN3_CODER = QWEN3_30B | {
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
    "max_position_embeddings": 262144,
}
# Qwen/Qwen1.5-MoE-A2.7B
QWEN2_A27B = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.39.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


def tiny(base: str = "qwen3", **overrides: Any) -> dict[str, Any]:
    """A small config.json, of transformers' own writing."""
    return as_json(AutoConfig.for_model(**(BASES[base] | overrides)))


def as_json(config: PreTrainedConfig) -> dict[str, Any]:
    return json.loads(config.to_json_string()) | {
        "architectures": [type(empty_model(config)).__name__],
    }


def empty_model(config: PreTrainedConfig | dict[str, Any]) -> PreTrainedModel:
    """transformers' model without storage, to ask for names and shapes."""
    if isinstance(config, dict):
        config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
