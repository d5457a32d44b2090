"""MiniMax-M2, M2.1, M2.5, M2.7: queries and keys normed as whole vectors, half of each head rotated."""

from __future__ import annotations

from turnout.models.fields import ConfigFields
from turnout.models.reading import check_no_windows, read_head_dim, read_moe, read_shape
from turnout.models.rope import read_rope
from turnout.models.spec import DecoderSpec, TensorNames
from turnout.moe.spec import Routing
from turnout.vocabulary import QKNorm, RoutingKind

NAMES = TensorNames(moe="block_sparse_moe", correction_bias="e_score_correction_bias")


def read_spec(fields: ConfigFields) -> DecoderSpec:
    head_dim = read_head_dim(fields)
    rotary_dim = fields.integer("rotary_dim", head_dim)
    if rotary_dim > head_dim:
        raise fields.wrong("rotary_dim", f"must not exceed head_dim ({head_dim})")
    rope = read_rope(fields, head_dim=head_dim, theta=5e6, partial=rotary_dim / head_dim)
    shape = read_shape(fields, architecture="MiniMaxM2ForCausalLM", max_positions=rope.max_positions)
    _check(fields, shape.num_layers)
    check_no_windows(fields, rope.max_positions)
    return DecoderSpec(
        shape=shape,
        moe=read_moe(
            fields,
            experts=("num_local_experts", "num_experts"),
            intermediate_size="intermediate_size",
            routing=Routing(kind=RoutingKind.SIGMOID_TOPK, renormalize=True),
        ),
        moe_layers=tuple(range(shape.num_layers)),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        names=NAMES,
        qk_norm=QKNorm.WHOLE,
        correction_bias=True,
        router_float32=True,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _check(fields: ConfigFields, num_layers: int) -> None:
    """Fields that the files spell out and that have one value in all of them."""
    fields.choice("use_qk_norm", (True,), default=True)
    fields.choice("qk_norm_type", ("per_layer",), default="per_layer")
    fields.choice("scoring_func", ("sigmoid",), default="sigmoid")
    fields.choice("use_routing_bias", (True,), default=True)
    kinds = fields.integers("attn_type_list", [1] * num_layers)
    if len(kinds) < num_layers or set(kinds) != {1}:
        raise fields.wrong("attn_type_list", f"must be {num_layers} times 1, full attention")
    # Training's, and draft modules that no checkpoint has: a tensor of theirs would be refused as unread.
    fields.unused("router_jitter_noise", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
