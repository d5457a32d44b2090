"""Llama-4 Scout and Maverick, their text part, up to one attention chunk: some layers do not rotate heads.

Within one chunk of `attention_chunk_size` tokens chunked attention is full attention. Queries of layers
without rope are scaled from position `floor_scale` - 1 on, so a context ends before it. The router's weight
multiplies what an expert reads.
"""

from __future__ import annotations

from dataclasses import replace

from turnout.models.fields import ConfigFields
from turnout.models.reading import read_dense_size, read_head_dim, read_moe, read_shape
from turnout.models.rope import NOPE, read_rope
from turnout.models.spec import DecoderSpec, SharedExpert, Skipped, TensorNames
from turnout.moe.spec import Routing
from turnout.vocabulary import QKNorm, RoutingKind

TEXT = TensorNames(moe="feed_forward", dense="feed_forward", router="router")
NESTED = replace(TEXT, model="language_model.model", head="language_model.lm_head")
VISION = (
    Skipped(what="vision tower", prefix="vision_model."),
    Skipped(what="vision projector", prefix="multi_modal_projector."),
)


def read_spec(fields: ConfigFields) -> DecoderSpec:
    """Of the whole model, whose text fields are below `text_config`."""
    text = fields.nested("text_config")
    fields.unused("vision_config", "boi_token_index", "eoi_token_index", "image_token_index")
    text.unused("tie_word_embeddings")  # the model's own flag counts
    spec = _read(text, architecture="Llama4ForConditionalGeneration")
    tied = fields.flag("tie_word_embeddings", False)
    return replace(spec, names=NESTED, skipped=VISION, tied_embeddings=tied)


def read_text_spec(fields: ConfigFields) -> DecoderSpec:
    """Of the text model by itself."""
    spec = _read(fields, architecture="Llama4ForCausalLM")
    return replace(spec, tied_embeddings=fields.flag("tie_word_embeddings", False))


def _read(fields: ConfigFields, *, architecture: str) -> DecoderSpec:
    rope = read_rope(fields, head_dim=read_head_dim(fields), theta=5e5, interleaved=True)
    positions = min(rope.max_positions, fields.integer("attention_chunk_size", 8192))
    floor_scale = fields.integer("floor_scale", 8192, minimum=2)
    # Some files say 4, which means true.
    if fields.choice("attn_temperature_tuning", (True, False, 4, 0), default=True):
        positions = min(positions, floor_scale - 1)
    shape = read_shape(fields, architecture=architecture, max_positions=positions)
    still = _read_nope_layers(fields, shape.num_layers)
    layers = (replace(layer, rope=NOPE) if i in still else layer for i, layer in enumerate(shape.attention))
    shape = replace(shape, attention=tuple(layers))
    _check(fields)
    moe_layers = _read_moe_layers(fields, shape.num_layers)
    bias = fields.flag("attention_bias", False)
    routing = Routing(kind=RoutingKind.SIGMOID_TOPK, renormalize=False, on_input=True)
    experts = ("num_local_experts", "num_experts")
    moe = read_moe(fields, experts=experts, intermediate_size="intermediate_size", routing=routing)
    return DecoderSpec(
        shape=shape,
        moe=moe,
        moe_layers=moe_layers,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        names=TEXT,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QKNorm.UNIT if fields.flag("use_qk_norm", True) else QKNorm.NONE,
        dense_intermediate_size=read_dense_size(
            fields, moe_layers, shape.num_layers, "intermediate_size_mlp"
        ),
        shared_expert=SharedExpert(intermediate_size=moe.intermediate_size, gated=False),
    )


def _check(fields: ConfigFields) -> None:
    fields.choice("num_experts_per_tok", (1,), default=1)
    for kind in fields.raw("layer_types") or []:
        if kind not in ("chunked_attention", "full_attention"):
            raise fields.wrong("layer_types", f"{kind!r} is not implemented")
    # Training's; where transformers keeps its cache; what acts beyond the contexts that are served.
    fields.unused("router_jitter_noise", "cache_implementation", "for_llm_compressor", "attn_scale")


def _read_moe_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    step = fields.integer("interleave_moe_layer_step", 1)
    layers = fields.integers("moe_layers", tuple(range(step - 1, num_layers, step)))
    if not layers or max(layers) >= num_layers:
        name = "interleave_moe_layer_step" if fields.raw("moe_layers") is None else "moe_layers"
        raise fields.wrong(name, f"must name at least one of the {num_layers} layers, and no other")
    return layers


def _read_nope_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    every = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.integers("no_rope_layers", ()) or [(i + 1) % every for i in range(num_layers)]
    if len(rotated) < num_layers:
        raise fields.wrong("no_rope_layers", f"must have an entry for each of the {num_layers} layers")
    return tuple(i for i in range(num_layers) if not rotated[i])
