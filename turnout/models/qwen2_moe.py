"""Qwen2-MoE: biases on queries, keys and values, and a shared expert behind a sigmoid gate."""

from __future__ import annotations

from turnout.models.fields import ConfigFields
from turnout.models.spec import DecoderSpec, read_decoder


def read_spec(fields: ConfigFields) -> DecoderSpec:
    return read_decoder(
        fields,
        architecture="Qwen2MoeForCausalLM",
        qkv_bias=fields.flag("qkv_bias", True),
        out_bias=False,
        qk_norm=False,
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", minimum=0),
    )
