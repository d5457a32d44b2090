"""Models that exist only as a config.json, which is all that a plan needs."""

import json
from pathlib import Path

from turnout.config import Config

# The published configuration of Qwen3-30B-A3B, but for fields that say nothing about the forward pass.
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
SMALL = QWEN3_30B | {
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "vocab_size": 512,
    "eos_token_id": 511,
    "max_position_embeddings": 2048,
}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}}


def write(folder: Path, fields: dict = SMALL, **flags) -> Config:
    """Write a config.json and return the configuration of its folder."""
    (folder / "config.json").write_text(json.dumps(fields))
    return Config(model=str(folder), **flags)
