"""Hy3 (Hunyuan 3): heads normed one by one, sigmoid routing with scaling, an ungated shared expert."""

from __future__ import annotations

from turnout.models.fields import ConfigFields
from turnout.models.reading import (
    check_no_windows,
    read_dense_size,
    read_draft_layers,
    read_first_dense,
    read_head_dim,
    read_moe,
    read_shape,
)
from turnout.models.rope import read_rope
from turnout.models.spec import DecoderSpec, SharedExpert, TensorNames
from turnout.moe.spec import Routing
from turnout.vocabulary import QKNorm, RoutingKind

NAMES = TensorNames(router="router.gate", correction_bias="expert_bias", shared_expert="shared_mlp")


def read_spec(fields: ConfigFields) -> DecoderSpec:
    rope = read_rope(fields, head_dim=read_head_dim(fields), theta=11158840.0)
    shape = read_shape(fields, architecture="HYV3ForCausalLM", max_positions=rope.max_positions)
    _check(fields)
    check_no_windows(fields, rope.max_positions)
    moe_layers = read_first_dense(fields, shape.num_layers, default=1)
    bias = fields.flag("attention_bias", False)
    routing = Routing(
        kind=RoutingKind.SIGMOID_TOPK,
        renormalize=True,
        scaling_factor=fields.number("router_scaling_factor", 2.826),
    )
    moe = read_moe(fields, experts=("num_experts", "num_local_experts"), routing=routing)
    size = moe.intermediate_size
    if fields.integer("expert_hidden_dim", size) != size:
        raise fields.wrong("expert_hidden_dim", f"contradicts moe_intermediate_size ({size})")
    shared = fields.integer("num_shared_experts", 1) * size
    return DecoderSpec(
        shape=shape,
        moe=moe,
        moe_layers=moe_layers,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        names=NAMES,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm.HEAD,
        dense_intermediate_size=read_dense_size(fields, moe_layers, shape.num_layers),
        shared_expert=SharedExpert(intermediate_size=shared, gated=False),
        correction_bias=True,
        router_float32=True,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        skipped=read_draft_layers(fields, NAMES, shape.num_layers),
    )


def _check(fields: ConfigFields) -> None:
    """Fields that the files spell out and that have one value in all of them."""
    for name in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        fields.choice(name, (True,), default=True)
    fields.choice("mlp_bias", (False,), default=False)
    # Where sums are made in float32: softmax, logits and the sum with the shared expert are here anyway.
    fields.unused("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine")
    fields.unused("use_grouped_mm", "eod_token_id", "sep_token_id")
