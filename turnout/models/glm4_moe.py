"""GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7: half of each head rotated, sigmoid routing, a shared expert."""

from __future__ import annotations

from turnout.models.fields import ConfigFields
from turnout.models.reading import (
    check_no_windows,
    read_dense_size,
    read_draft_layers,
    read_first_dense,
    read_grouped_moe,
    read_head_dim,
    read_shape,
    read_shared_experts,
)
from turnout.models.rope import read_rope
from turnout.models.spec import DecoderSpec, TensorNames
from turnout.vocabulary import QKNorm

NAMES = TensorNames(shared_expert="shared_experts")


def read_spec(fields: ConfigFields) -> DecoderSpec:
    rope = read_rope(fields, head_dim=read_head_dim(fields), partial=0.5)
    shape = read_shape(fields, architecture="Glm4MoeForCausalLM", max_positions=rope.max_positions)
    check_no_windows(fields, rope.max_positions)
    moe_layers = read_first_dense(fields, shape.num_layers, default=1)
    moe = read_grouped_moe(fields, scaling_factor=1.0)
    draft_layers = read_draft_layers(fields, NAMES, shape.num_layers)
    return DecoderSpec(
        shape=shape,
        moe=moe,
        moe_layers=moe_layers,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        names=NAMES,
        qkv_bias=fields.flag("attention_bias", False),  # never on the output projection
        qk_norm=QKNorm.HEAD if fields.flag("use_qk_norm", False) else QKNorm.NONE,
        dense_intermediate_size=read_dense_size(fields, moe_layers, shape.num_layers),
        shared_expert=read_shared_experts(fields, moe.intermediate_size),
        correction_bias=True,
        router_float32=True,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        skipped=draft_layers,
        draft_layers=len(draft_layers),
    )
