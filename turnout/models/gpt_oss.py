"""GPT-OSS 20B and 120B: sinks, a window in every other layer, biases everywhere, clamped SwiGLU experts."""

from __future__ import annotations

from dataclasses import replace

from turnout.attention.kinds import AttentionSpec
from turnout.models.fields import ConfigFields
from turnout.models.reading import read_moe, read_shape
from turnout.models.rope import read_rope
from turnout.models.spec import DecoderSpec, TensorNames
from turnout.moe.spec import Activation, MoESpec, Routing
from turnout.vocabulary import ActivationKind, RoutingKind

SLIDING, FULL = "sliding_attention", "full_attention"


def read_spec(fields: ConfigFields) -> DecoderSpec:
    head_dim = fields.integer("head_dim", 64)
    if not (fields.raw("rope_scaling") or fields.raw("rope_parameters")):
        raise fields.wrong("rope_scaling", "must be given: the published models interpolate by YaRN")
    rope = read_rope(fields, head_dim=head_dim, theta=150000.0)
    shape = read_shape(
        fields, architecture="GptOssForCausalLM", max_positions=rope.max_positions, head_dim=head_dim
    )
    fields.choice("attention_bias", (True,), default=True)
    fields.unused("initial_context_length")  # the same as the rope's original_max_position_embeddings
    return DecoderSpec(
        shape=replace(shape, attention=_read_layers(fields, shape.attention)),
        moe=_read_moe(fields),
        moe_layers=tuple(range(shape.num_layers)),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        names=TensorNames(router="router"),
        qkv_bias=True,
        out_bias=True,
        router_bias=True,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _read_layers(fields: ConfigFields, layers: tuple[AttentionSpec, ...]) -> tuple[AttentionSpec, ...]:
    """Without `layer_types` even layers have the window."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        kinds = [FULL if i % 2 else SLIDING for i in range(len(layers))]
    if not isinstance(kinds, list) or len(kinds) != len(layers):
        raise fields.wrong("layer_types", f"must be a list of {len(layers)} kinds, one for each layer")
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise fields.wrong("layer_types", f"{kind!r} is not implemented; only {SLIDING} and {FULL} are")
    window = fields.integer("sliding_window") if SLIDING in kinds else 0
    fields.unused("sliding_window")
    return tuple(
        replace(layer.sliding(window) if kind == SLIDING else layer, sinks=True)
        for layer, kind in zip(layers, kinds, strict=True)
    )


def _read_moe(fields: ConfigFields) -> MoESpec:
    moe = read_moe(
        fields,
        experts=("num_local_experts", "num_experts"),
        intermediate_size="intermediate_size",
        routing=Routing(kind=RoutingKind.TOPK_SOFTMAX),
    )
    if fields.raw("experts_per_token") not in (None, moe.top_k):  # the published files say it twice
        raise fields.wrong("experts_per_token", f"contradicts num_experts_per_tok ({moe.top_k})")
    swiglu = Activation(
        kind=ActivationKind.SWIGLU,
        alpha=fields.number("swiglu_alpha", 1.702),
        beta=1.0,
        limit=fields.number("swiglu_limit", 7.0),
    )
    return replace(moe, activation=swiglu, expert_bias=True)
