"""Qwen3-MoE: queries and keys are normed per head, every MLP may be an MoE layer, no shared expert."""

from __future__ import annotations

from turnout.models.fields import ConfigFields
from turnout.models.spec import DecoderSpec, read_decoder


def read_spec(fields: ConfigFields) -> DecoderSpec:
    fields.choice("use_qk_norm", (True,), default=True)  # Qwen3-Coder's files spell it out
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture="Qwen3MoeForCausalLM",
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        shared_intermediate_size=0,
    )
