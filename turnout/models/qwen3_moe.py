"""Qwen3-MoE, Qwen3-Coder: queries and keys are normed per head, every MLP may be an MoE layer."""

from __future__ import annotations

from collections.abc import Callable

from turnout.models.fields import ConfigFields
from turnout.models.reading import (
    FULL,
    SLIDING,
    check_no_windows,
    read_dense_size,
    read_head_dim,
    read_moe,
    read_shape,
    read_sparse_step,
    read_windows,
)
from turnout.models.rope import Rope, read_rope
from turnout.models.spec import DecoderSpec
from turnout.moe.spec import Routing
from turnout.vocabulary import QKNorm, RoutingKind


def read_spec(fields: ConfigFields) -> DecoderSpec:
    fields.choice("use_qk_norm", (True,), default=True)  # Qwen3-Coder's files spell it out
    bias = fields.flag("attention_bias", False)
    return read_qwen(
        fields,
        architecture="Qwen3MoeForCausalLM",
        rope=read_rope(fields, head_dim=read_head_dim(fields)),
        renormalize=fields.flag("norm_topk_prob", False),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm.HEAD,
        slides=lambda layer: True,
    )


def read_qwen(
    fields: ConfigFields,
    *,
    architecture: str,
    rope: Rope,
    renormalize: bool,
    qkv_bias: bool,
    out_bias: bool,
    qk_norm: QKNorm,
    slides: Callable[[int], bool] | None = None,
) -> DecoderSpec:
    """What the files of Qwen2-MoE, Qwen3-MoE and Qwen3-VL-MoE have in common.

    slides: which layers have a window where `use_sliding_window` says that there are any; None: none can.
    """
    shape = read_shape(fields, architecture=architecture, max_positions=rope.max_positions)
    if slides is not None and fields.flag("use_sliding_window", False):
        kinds = [SLIDING if slides(layer) else FULL for layer in range(shape.num_layers)]
        shape = read_windows(fields, shape, kinds)
    else:
        check_no_windows(fields, rope.max_positions)
    moe_layers = read_sparse_step(fields, shape.num_layers)
    routing = Routing(kind=RoutingKind.SOFTMAX_TOPK, renormalize=renormalize)
    return DecoderSpec(
        shape=shape,
        moe=read_moe(fields, experts=("num_experts", "num_local_experts"), routing=routing),
        moe_layers=moe_layers,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        dense_intermediate_size=read_dense_size(fields, moe_layers, shape.num_layers),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )
