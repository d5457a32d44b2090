"""Mixtral 8x7B, 8x22B: softmax routing, experts named w1, w3, w2, no bias and no norm in attention."""

from __future__ import annotations

from turnout.models.fields import ConfigFields
from turnout.models.reading import FULL, SLIDING, read_head_dim, read_moe, read_shape, read_windows
from turnout.models.rope import read_rope
from turnout.models.spec import DecoderSpec, TensorNames
from turnout.moe.spec import Routing
from turnout.vocabulary import RoutingKind

NAMES = TensorNames(moe="block_sparse_moe")


def read_spec(fields: ConfigFields) -> DecoderSpec:
    rope = read_rope(fields, head_dim=read_head_dim(fields), theta=1e6)
    shape = read_shape(fields, architecture="MixtralForCausalLM", max_positions=rope.max_positions)
    kind = FULL if fields.raw("sliding_window") is None else SLIDING  # v0.1's first files have a window
    shape = read_windows(fields, shape, [kind] * shape.num_layers)
    fields.unused("router_jitter_noise")  # in training only
    return DecoderSpec(
        shape=shape,
        moe=read_moe(
            fields,
            experts=("num_local_experts", "num_experts"),
            intermediate_size="intermediate_size",
            routing=Routing(kind=RoutingKind.SOFTMAX_TOPK, renormalize=True),
        ),
        moe_layers=tuple(range(shape.num_layers)),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        names=NAMES,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )
