"""GPT-OSS 20B and 120B: sinks, a window in every other layer, biases everywhere, clamped SwiGLU experts."""

from __future__ import annotations

from dataclasses import replace

from turnout.models.fields import ConfigFields
from turnout.models.reading import FULL, SLIDING, read_moe, read_shape, read_windows
from turnout.models.rope import read_rope
from turnout.models.spec import DecoderSpec, TensorNames
from turnout.moe.spec import Activation, MoESpec, Routing
from turnout.vocabulary import ActivationKind, RoutingKind


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
    windows = read_windows(fields, shape, [FULL if i % 2 else SLIDING for i in range(shape.num_layers)])
    return DecoderSpec(
        shape=replace(windows, attention=tuple(replace(layer, sinks=True) for layer in windows.attention)),
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
