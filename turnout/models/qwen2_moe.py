"""Qwen2-MoE, Qwen1.5-MoE: biases on queries, keys and values; a shared expert behind a sigmoid gate."""

from __future__ import annotations

from dataclasses import replace

from turnout.models.fields import ConfigFields
from turnout.models.qwen3_moe import read_qwen
from turnout.models.reading import read_head_dim
from turnout.models.rope import read_rope
from turnout.models.spec import DecoderSpec, SharedExpert
from turnout.vocabulary import QKNorm


def read_spec(fields: ConfigFields) -> DecoderSpec:
    spec = read_qwen(
        fields,
        architecture="Qwen2MoeForCausalLM",
        rope=read_rope(fields, head_dim=read_head_dim(fields)),
        renormalize=fields.flag("norm_topk_prob", False),
        qkv_bias=fields.flag("qkv_bias", True),
        out_bias=False,
        qk_norm=QKNorm.NONE,
        slides=lambda layer: layer % 2 == 0 and layer < fields.integer("max_window_layers", 28, minimum=0),
    )
    shared = fields.integer("shared_expert_intermediate_size", minimum=0)
    return replace(spec, shared_expert=SharedExpert(intermediate_size=shared, gated=True) if shared else None)
