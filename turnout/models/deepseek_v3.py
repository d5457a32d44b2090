"""DeepSeek-V3, R1 and V3.1, Kimi-K2, Moonlight: latent attention, sigmoid routing by groups."""

from __future__ import annotations

from turnout.attention.kinds import AttentionSpec
from turnout.models.fields import ConfigFields
from turnout.models.reading import (
    read_dense_size,
    read_draft_layers,
    read_first_dense,
    read_grouped_moe,
    read_shape,
    read_shared_experts,
)
from turnout.models.rope import Rope, read_rope
from turnout.models.spec import DecoderSpec, LatentProjections, TensorNames

NAMES = TensorNames(shared_expert="shared_experts")


def read_spec(fields: ConfigFields) -> DecoderSpec:
    return read_deepseek(fields, architecture="DeepseekV3ForCausalLM")


def read_kimi_k2(fields: ConfigFields) -> DecoderSpec:
    return read_deepseek(fields, architecture="KimiK2ForCausalLM")


def read_deepseek(
    fields: ConfigFields,
    *,
    architecture: str,
    first_dense: int = 3,
    scaling_factor: float = 2.5,
    norm_eps: float = 1e-6,
    drafts: bool = True,
) -> DecoderSpec:
    """The fields of DeepSeek-V3. Defaults are given where families differ in them. drafts: its draft layer
    is served."""
    fields.choice("partial_rotary_factor", (1.0, 1), default=1.0)  # of the part of a head that is rotated
    fields.choice("rope_interleave", (True,), default=True)
    rope = read_rope(fields, head_dim=fields.integer("qk_rope_head_dim"), interleaved=True)
    shape = read_shape(
        fields,
        architecture=architecture,
        max_positions=rope.max_positions,
        layer=_read_attention(fields, rope),
    )
    moe_layers = read_first_dense(fields, shape.num_layers, default=first_dense)
    moe = read_grouped_moe(fields, scaling_factor)
    fields.choice("moe_layer_freq", (1,), default=1)
    fields.unused("ep_size", "aux_loss_alpha", "seq_aux", "pretraining_tp")  # of training
    query_rank = fields.integer("q_lora_rank", 0, minimum=0)
    draft_layers = read_draft_layers(fields, NAMES, shape.num_layers)
    return DecoderSpec(
        shape=shape,
        moe=moe,
        moe_layers=moe_layers,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", norm_eps),
        names=NAMES,
        latent=LatentProjections(query_rank=query_rank),
        dense_intermediate_size=read_dense_size(fields, moe_layers, shape.num_layers),
        shared_expert=read_shared_experts(fields, moe.intermediate_size),
        correction_bias=True,
        router_float32=True,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        skipped=draft_layers,
        draft_layers=len(draft_layers) if drafts else 0,
    )


def _read_attention(fields: ConfigFields, rope: Rope) -> AttentionSpec:
    fields.choice("attention_bias", (False,), default=False)
    # The size of the rotated part, and nothing: all heads share the latent vector.
    fields.unused("head_dim", "num_key_value_heads")
    spec = AttentionSpec.latent(
        num_heads=fields.integer("num_attention_heads"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=rope.head_dim,
        value_dim=fields.integer("v_head_dim"),
        latent_dim=fields.integer("kv_lora_rank"),
        scaling=rope.latent_scaling,
    )
    if fields.integer("qk_head_dim", spec.head_dim) != spec.head_dim:
        raise fields.wrong(
            "qk_head_dim", f"contradicts qk_nope_head_dim + qk_rope_head_dim ({spec.head_dim})"
        )
    return spec
