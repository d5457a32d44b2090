"""Every family that is compared with transformers: a tiny model of it, and how its publisher names tensors.

    built = build(folder, FAMILIES["glm4_moe"])    # a model, and its weights as a release has them
    built.model(ids)                               # the reference
    built.folder                                   # the checkpoint: renamed and unstacked here, by hand

Every bias, correction bias and norm weight is random: at their initial values, 0 and 1, they would hide
being ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.checkpoint.writers import Tensors, save
from tests.tiny import write_tokenizer

COMMON = {
    "vocab_size": 387,  # which no number of ranks divides
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 257,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
EXPERTS = re.compile(r"(.*\.(?:mlp|feed_forward)\.experts)\.(gate_up_proj|down_proj)")
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def one_by_one(tensors: Mapping[str, Tensor], names: tuple[str, str, str] = GATE_UP_DOWN) -> Tensors:
    """Each expert's matrices apart, called `names`, from transformers' gate_up_proj [E, 2I, H]."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        match = EXPERTS.fullmatch(name)
        if match is None:
            out[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            parts = zip(names[:2], matrix.chunk(2), strict=True)
            for part, rows in parts if match[2] == "gate_up_proj" else ((names[2], matrix),):
                out[f"{match[1]}.{e}.{part}.weight"] = rows
    return out


def transposed(tensors: Mapping[str, Tensor]) -> Tensors:
    """Stacked experts as [E, K, N]."""
    return {n: t.transpose(1, 2) if EXPERTS.fullmatch(n) else t for n, t in tensors.items()}


def renamed(tensors: Mapping[str, Tensor], *pairs: tuple[str, str]) -> Tensors:
    """`re.sub` of every name, pair by pair."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, replacement in pairs:
            name = re.sub(pattern, replacement, name)
        out[name] = tensor
    return out


def with_draft_layer(tensors: Tensors, layer: int) -> Tensors:
    """DeepSeek's multi-token prediction, as GLM and Hy3 publish it behind the last layer."""
    prefix = f"model.layers.{layer}"
    extra = {
        f"{prefix}.{name}": torch.ones(64)
        for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    return tensors | extra | {f"{prefix}.eh_proj.weight": torch.ones(64, 128)}


def deepseek_v4(tensors: Mapping[str, Tensor]) -> Tensors:
    """With tensors of a draft stage, which are skipped."""
    released = renamed(
        one_by_one(tensors, ("w1", "w3", "w2")),
        (r"^model\.embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"^model\.hc_head\.hc_", "hc_head_"),
        (r"^model\.", ""),
        (r"\.self_attn\.compressor\.indexer\.(scorer\.)?(weights_proj|q_b_proj)", r".attn.indexer.\2"),
        (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
        (r"\.self_attn\.", ".attn."),
        (r"compressor\.kv_norm", "compressor.norm"),
        (r"\.input_layernorm", ".attn_norm"),
        (r"\.post_attention_layernorm", ".ffn_norm"),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"\.q_a_norm", ".q_norm"),
        (r"\.(q|o)_(a|b)_proj", r".w\1_\2"),
        (r"attn(.*)\.kv_proj", r"attn\1.wkv"),
        (r"attn(.*)\.gate_proj", r"attn\1.wgate"),
        (r"\.position_bias", ".ape"),
        (r"\.sinks", ".attn_sink"),
        (r"\.mlp\.", ".ffn."),
        (r"e_score_correction_bias", "bias"),
        (r"shared_experts\.gate_proj", "shared_experts.w1"),
        (r"shared_experts\.up_proj", "shared_experts.w3"),
        (r"shared_experts\.down_proj", "shared_experts.w2"),
    )
    return released | {"mtp.0.enorm.weight": torch.ones(64)}


@dataclass(frozen=True, kw_only=True)
class Family:
    """config: beyond COMMON, of transformers' config class. release: from the state of transformers' model to
    a publisher's tensors. extra: fields that publishers' files have and transformers' class has not."""

    architecture: str
    config: dict[str, Any]
    release: Callable[[Tensors], Tensors]
    extra: dict[str, Any] = field(default_factory=dict)
    formats: tuple[str, ...] = ()  # of published checkpoints, by the names of tests/checkpoint/writers.py
    own_formats: tuple[str, ...] = ()  # compared by the family's own tests
    text: bool = True  # a text model; otherwise the text part of a vision model
    norms_around_one: bool = False  # norms multiply by 1 + weight
    reuses: bool = True  # prefixes

    @property
    def model_type(self) -> str:
        return self.config["model_type"]


# Of Qwen3-Next and Qwen3.5: three recurrent layers, then one of attention.
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}

COMPRESSED_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
INDEXER = {
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
}  # few heads tie, and any choice is right
LATENT = {  # beyond COMMON, of DeepSeek-V3 and its followers
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # of the rotated part, as transformers has it
    "num_key_value_heads": 4,
    "v_head_dim": 12,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
FAMILIES = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        config={
            "model_type": "mixtral",
            "sliding_window": 24,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        formats=(
            "bf16",
            "fp8",
        ),
        release=lambda t: renamed(one_by_one(t, ("w1", "w3", "w2")), (r"\.mlp\.", ".block_sparse_moe.")),
        extra={"router_jitter_noise": 0.0, "output_router_logits": False},
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        config={
            "model_type": "glm4_moe",
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "partial_rotary_factor": 0.5,
        },
        formats=("bf16", "fp8-dynamic", "compressed-tensors", "modelopt"),
        release=lambda t: with_draft_layer(one_by_one(t), 3),
        extra={"num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
    "glm4_moe_air": Family(
        architecture="Glm4MoeForCausalLM",
        config={
            "model_type": "glm4_moe",
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 16,
            "n_shared_experts": 2,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        formats=(
            "bf16",
            "fp8-block",
        ),
        release=one_by_one,
        extra={"num_nextn_predict_layers": 0},
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        config={
            "model_type": "minimax_m2",
            "intermediate_size": 32,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "rotary_dim": 8,
        },
        formats=(
            "bf16",
            "fp8",
        ),
        release=lambda t: renamed(one_by_one(t, ("w1", "w3", "w2")), (r"\.mlp\.", ".block_sparse_moe.")),
        extra={
            "attn_type_list": [1] * 3,
            "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
            "mtp_transformer_layers": 1,
            "num_mtp_modules": 3,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "use_mtp": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
    ),
    "hy_v3": Family(
        architecture="HYV3ForCausalLM",
        config={
            "model_type": "hy_v3",
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "num_shared_experts": 1,
        },
        formats=("bf16", "fp8", "compressed-mxfp4"),
        release=lambda t: with_draft_layer(
            renamed(
                one_by_one(t),
                (r"\.mlp\.gate\.weight", ".mlp.router.gate.weight"),
                (r"\.mlp\.e_score_correction_bias", ".mlp.expert_bias"),
                (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
            ),
            3,
        ),
        extra={
            "enable_attention_fp32_softmax": True,
            "enable_lm_head_fp32": True,
            "enable_moe_fp32_combine": True,
            "expert_hidden_dim": 32,
            "first_k_dense_replace": 1,
            "moe_router_enable_expert_bias": True,
            "moe_router_use_sigmoid": True,
            "num_nextn_predict_layers": 1,
            "qk_norm": True,
            "route_norm": True,
            "use_grouped_mm": True,
        },
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        config={
            "model_type": "gpt_oss",
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        release=dict,  # experts stacked and transposed, as in bf16 copies of the published files
        extra={"experts_per_token": 2, "initial_context_length": 128, "swiglu_limit": 7.0},
        own_formats=("bf16", "mxfp4"),
    ),
    "qwen3_vl_moe": Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        config={
            "model_type": "qwen3_vl_moe",
            "text_config": {
                "intermediate_size": 96,
                "moe_intermediate_size": 96,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "rope_parameters": {"rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 16,
            },
        },
        formats=(
            "bf16",
            "fp8",
        ),
        release=lambda t: transposed(t),
        text=False,
    ),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        norms_around_one=True,
        reuses=False,
        config={"model_type": "qwen3_next", "intermediate_size": 96} | HYBRID,
        formats=("bf16", "fp8"),
        release=one_by_one,
        extra={"full_attention_interval": 4, "use_sliding_window": False},
    ),
    "qwen3_5_moe": Family(
        architecture="Qwen3_5MoeForConditionalGeneration",
        norms_around_one=True,
        reuses=False,
        config={
            "model_type": "qwen3_5_moe",
            "text_config": HYBRID
            | {
                "linear_num_value_heads": 12,
                "rope_parameters": {
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
            },
        },
        formats=("bf16", "fp8", "modelopt", "compressed-tensors", "modelopt-mixed"),
        release=dict,  # experts stacked, not transposed
        text=False,
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5MoeForCausalLM",
        norms_around_one=True,
        reuses=False,
        config={"model_type": "qwen3_5_moe_text"} | HYBRID,
        formats=("bf16",),
        release=one_by_one,
        extra={"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
    ),
    "llama4": Family(
        architecture="Llama4ForConditionalGeneration",
        config={
            "model_type": "llama4",
            "text_config": {
                "intermediate_size": 32,
                "intermediate_size_mlp": 96,
                "num_hidden_layers": 4,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 1, 1, 0],
                "use_qk_norm": True,
                "attention_chunk_size": 128,
                "floor_scale": 128,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 16.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 64,
                },
            },
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "image_size": 28,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
        formats=("bf16", "fp8-dynamic"),
        release=lambda t: renamed(
            t,
            (r"^model\.language_model\.", "language_model.model."),
            (r"^model\.(vision_model|multi_modal_projector)\.", r"\1."),
            (r"^lm_head\.", "language_model.lm_head."),
        ),
        text=False,
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        config={"model_type": "deepseek_v3", "q_lora_rank": 48, "n_group": 4, "topk_group": 2} | LATENT,
        formats=("bf16", "fp8", "fp8-ue8m0", "modelopt", "modelopt-fp8-nvfp4", "int4-kimi"),
        release=lambda t: with_draft_layer(one_by_one(t), 3),
        extra={
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "scoring_func": "sigmoid",
            "seq_aux": True,
            "topk_method": "noaux_tc",
        },
    ),
    "moonlight": Family(
        architecture="DeepseekV3ForCausalLM",
        config={
            "model_type": "deepseek_v3",
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
            "tie_word_embeddings": True,
        }
        | {name: value for name, value in LATENT.items() if name != "rope_parameters"},
        formats=("bf16",),
        release=one_by_one,
        extra={"num_nextn_predict_layers": 0},
    ),
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM",
        config={
            "model_type": "glm4_moe_lite",
            "q_lora_rank": 48,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-2,  # which the norms of latent vectors do not take
        }
        | {
            name: value
            for name, value in LATENT.items()
            if name not in ("rope_parameters", "n_shared_experts")
        },
        formats=("bf16", "modelopt", "modelopt-fp8-nvfp4"),
        release=lambda t: with_draft_layer(one_by_one(t), 3),
        extra={"num_nextn_predict_layers": 1},
    ),
    "deepseek_v32": Family(
        architecture="DeepseekV32ForCausalLM",
        config={"model_type": "deepseek_v32", "q_lora_rank": 48, "n_group": 4, "topk_group": 2}
        | LATENT
        | INDEXER,
        formats=("bf16", "fp8", "modelopt"),
        release=lambda t: with_draft_layer(one_by_one(t), 3),
        extra={"num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    ),
    "glm_moe_dsa": Family(
        architecture="GlmMoeDsaForCausalLM",
        config={
            "model_type": "glm_moe_dsa",
            "q_lora_rank": 48,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "full", "shared", "full"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        }
        | {name: value for name, value in LATENT.items() if name != "rope_parameters"}
        | INDEXER,
        formats=("bf16", "fp8"),
        release=lambda t: with_draft_layer(one_by_one(t), 4),
        extra={"num_nextn_predict_layers": 1, "indexer_rope_interleave": True},
    ),
    "deepseek_v4": Family(
        architecture="DeepseekV4ForCausalLM",
        reuses=False,
        config={
            "model_type": "deepseek_v4",
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "sliding_window": 8,
            "num_attention_heads": 8,
            "o_groups": 4,  # of two heads
            "o_lora_rank": 16,
            "index_n_heads": 16,  # few heads tie, and any choice is right
            "index_head_dim": 16,
            "index_topk": 4,
            "swiglu_limit": 0.05,  # which products exceed
            "partial_rotary_factor": 0.25,
            "rope_parameters": COMPRESSED_ROPE,
        },
        formats=("bf16",),
        own_formats=("fp4", "fp8"),
        release=deepseek_v4,
        extra={
            "layer_types": [  # of the release's compress_ratios transformers takes no rate but 4 and 128
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "expert_dtype": "fp4",
            "num_hash_layers": 2,
            "qk_rope_head_dim": 8,
            "rope_theta": 10000.0,
            "rope_scaling": COMPRESSED_ROPE,
            "topk_method": "noaux_tc",
        },
    ),
    "kimi_k25": Family(
        architecture="KimiK25ForConditionalGeneration",
        config={
            "model_type": "kimi_k25",
            "text_config": {"model_type": "kimi_k2", "q_lora_rank": 48, "n_group": 1, "topk_group": 1}
            | LATENT,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "projection_hidden_size": 16,
        },
        formats=("bf16", "int4-kimi"),
        release=lambda t: renamed(
            one_by_one(t),
            (r"^model\.language_model\.", "language_model.model."),
            (r"^lm_head\.", "language_model.lm_head."),
            (r"^model\.(vision_tower|mm_projector)\.", r"\1."),
        ),
        text=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Built:
    family: Family
    folder: Path  # in release names
    model: PreTrainedModel
    config: dict[str, Any]
    tensors: Tensors  # those of the folder

    @property
    def skips(self) -> bool:
        """Whether the folder holds more than transformers' text model does."""
        return self.config.get("num_nextn_predict_layers", 0) > 0 or not self.family.text


def build(folder: Path, family: Family, *, seed: int = 0, **overrides: Any) -> Built:
    """Write a random model in float32 to `folder`, as its publisher would."""
    model = random_model(family, seed=seed, **overrides)
    tensors = family.release({name: t.detach().clone() for name, t in model.state_dict().items()})
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    config = release_config(family, model)
    write(folder, config, tensors)
    return Built(family=family, folder=folder, model=model, config=config, tensors=tensors)


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save(folder, tensors)
    write_tokenizer(folder)


def random_model(family: Family, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(**with_common(family.config, **overrides))
    torch.manual_seed(seed)
    make = AutoModelForCausalLM if family.text else AutoModelForImageTextToText
    model = make.from_config(config, attn_implementation="eager").eval().float()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(noise(name, tensor, around_one=family.norms_around_one))
        elif name.endswith("tid2eid"):
            experts = torch.rand(len(tensor), model.config.n_routed_experts).argsort(1)
            tensor.copy_(experts[:, : tensor.shape[1]])
    return model


def with_common(config: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """The fields of the text model are COMMON's unless they are given."""
    if "text_config" in config:
        return config | {
            "text_config": COMMON | config["text_config"] | overrides,
            "tie_word_embeddings": False,
        }
    return COMMON | config | overrides


def noise(name: str, tensor: Tensor, *, around_one: bool = False) -> Tensor:
    """around_one: norms add 1 to their weights."""
    drawn = torch.randn(tensor.shape)
    if "norm" in name:
        return 0.1 * drawn if around_one and "linear_attn" not in name else 1 + 0.1 * drawn
    if "correction_bias" in name:
        return 0.3 * drawn
    if name.endswith(("sinks", "A_log")):
        return drawn
    if "conv1d" in name:
        return 0.5 * drawn
    if name.endswith(("gate.weight", "router.weight")):
        return 0.5 * drawn
    return (0.3 if name.endswith("bias") else 0.08) * drawn


def release_config(family: Family, model: PreTrainedModel) -> dict[str, Any]:
    """transformers' fields with those of a release, such as a rope next to the other fields."""
    config = json.loads(model.config.to_json_string())
    text = config.get("text_config", config)
    rope = text.pop("rope_parameters")
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            text[name] = rope.pop(name)
    text["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" or len(rope) > 1 else None
    text.pop("layer_types", None)
    return config | {"architectures": [family.architecture]} | family.extra
