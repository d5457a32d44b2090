"""DeepSeek-V4 (Flash, Pro): compressed attention, four residual streams, layers that route by token id."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turnout.attention.kinds import CompressedSpec
from turnout.models.fields import ConfigFields
from turnout.models.reading import read_moe, read_shape, read_shared_experts
from turnout.models.rope import DEFAULT_THETA, Rope, read_rope
from turnout.models.spec import (
    COMPRESSED_ROPE,
    CompressedProjections,
    DecoderSpec,
    Skipped,
    StreamSpec,
    TensorNames,
)
from turnout.moe.spec import Activation, Routing
from turnout.vocabulary import ActivationKind, RoutingKind

NAMES = TensorNames(
    model="",
    head="head",
    embedding="embed",
    attention="attn",
    attention_norm="attn_norm",
    mlp_norm="ffn_norm",
    moe="ffn",
    dense="ffn",
    correction_bias="gate.bias",
    shared_expert="shared_experts",
    gate_up_down=("w1", "w3", "w2"),
)
# What transformers saves under other names than the release.
RENAMES = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.(?=norm\.|layers\.\d+\.(?:attn|ffn|hc_))", ""),
    (r"^(layers\.\d+\.attn)\.norm\.", r"\1.kv_norm."),
)
SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
EXPERTS = ("n_routed_experts", "num_local_experts")


def read_spec(fields: ConfigFields) -> DecoderSpec:
    head_dim, max_positions = fields.integer("head_dim"), fields.integer("max_position_embeddings")
    rope_dim = _read_rope_dim(fields, head_dim)
    plain, long = _read_ropes(fields, rope_dim, max_positions)
    count = fields.integer("num_hidden_layers")
    shape = read_shape(
        fields,
        architecture="DeepseekV4ForCausalLM",
        max_positions=max_positions,
        layer=_layer(fields, rope_dim),
    )
    rates = _read_rates(fields, count)
    moe = read_moe(fields, experts=EXPERTS, routing=_read_routing(fields))
    limit = fields.number("swiglu_limit", 10.0)
    fields.choice("vision_n_layers", (0,), default=0)
    fields.choice("attention_bias", (False,), default=False)
    fields.choice("mlp_bias", (False,), default=False)
    fields.choice("num_key_value_heads", (1,), default=1)
    fields.integer("num_nextn_predict_layers", 0, minimum=0)
    # Of draft stages, of training, and of files that say it in quantization_config or by their dtypes.
    fields.unused(
        "dspark_block_size",
        "dspark_target_layer_ids",
        "dspark_markov_rank",
        "dspark_noise_token_id",
        "router_jitter_noise",
        "expert_dtype",
        "n_mtp_layers",
    )
    streams = fields.choice("hc_mult", (4,), default=4)
    return DecoderSpec(
        shape=replace(
            shape,
            attention=tuple(_with_entries(fields, shape.attention[0], rate) for rate in rates),
            residual_streams=streams,
        ),
        moe=replace(moe, activation=Activation(kind=ActivationKind.SWIGLU, limit=limit)),
        moe_layers=tuple(range(count)),
        rope=plain,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        names=NAMES,
        compressed=CompressedProjections(
            query_rank=fields.integer("q_lora_rank"), output_rank=fields.integer("o_lora_rank")
        ),
        compressed_rope=long,
        streams=StreamSpec(
            count=streams,
            iterations=fields.integer("hc_sinkhorn_iters", 20),
            eps=fields.number("hc_eps", 1e-6),
        ),
        hash_layers=_read_hash_layers(fields, count),
        mlp_limit=limit,
        renames=RENAMES,
        shared_expert=read_shared_experts(fields, moe.intermediate_size),
        correction_bias=True,
        router_float32=True,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        skipped=(Skipped(what="draft stages", prefix="mtp."),),
    )


def _read_rope_dim(fields: ConfigFields, head_dim: int) -> int:
    """The rotated end of a head."""
    factor = fields.number("partial_rotary_factor", 64 / 512)
    size = fields.integer("qk_rope_head_dim", int(head_dim * factor))
    if size % 2 or size > head_dim:
        raise fields.wrong("qk_rope_head_dim", f"must be an even number, at most head_dim ({head_dim})")
    return size


def _read_ropes(fields: ConfigFields, rope_dim: int, max_positions: int) -> tuple[Rope, Rope]:
    """Of layers without entries and of those with entries. transformers writes both of them in full."""
    given: Any = fields.raw("rope_parameters") or fields.raw("rope_scaling") or {}
    fields.unused("rope_scaling", "rope_parameters")
    theta = fields.number("rope_theta", DEFAULT_THETA)
    long_theta = fields.number("compress_rope_theta", 160000.0)
    if not isinstance(given, dict):
        raise fields.wrong("rope_scaling", "must be an object")
    plain, long = given.get("main", {}), given.get("compress", given)
    if not isinstance(plain, dict) or not isinstance(long, dict):
        raise fields.wrong("rope_parameters", "must have objects called main and compress")
    if "compress" not in given:  # its theta is compress_rope_theta, whatever theta it repeats
        long = {name: value for name, value in long.items() if name != "rope_theta"}
    kind = long.get("rope_type") or long.get("type") or "default"
    if kind == "yarn":
        long = {"attention_factor": 1.0} | long  # cos and sin are not scaled
    found = []
    for rope, default in ((plain, theta), (long, long_theta)):
        # The factor is of head_dim, and `rope_dim` has been read by it.
        rope = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
        values = {"max_position_embeddings": max_positions, "rope_theta": default, "rope_parameters": rope}
        found.append(read_rope(ConfigFields(values, fields.where), head_dim=rope_dim, theta=default))
    return found[0], found[1]


def _layer(fields: ConfigFields, rope_dim: int) -> CompressedSpec:
    """Without entries."""
    heads, head_dim, groups = (fields.integer(x) for x in ("num_attention_heads", "head_dim", "o_groups"))
    if heads % groups:
        raise fields.wrong("o_groups", f"must divide num_attention_heads ({heads})")
    return CompressedSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        value_dim=head_dim,
        scale=head_dim**-0.5,
        rope_dim=rope_dim,
        sinks=True,
        recent=fields.integer("sliding_window", 128),
        output_groups=groups,
    )


def _with_entries(fields: ConfigFields, layer: Any, rate: tuple[str, int]) -> CompressedSpec:
    kind, tokens = rate
    if kind == SLIDING:
        return replace(layer)
    found: CompressedSpec = replace(layer, rate=tokens, rope=COMPRESSED_ROPE)
    if kind == HEAVY:
        return found
    dim = fields.integer("index_head_dim")
    if dim < layer.rope_dim:
        raise fields.wrong("index_head_dim", f"must be at least qk_rope_head_dim ({layer.rope_dim})")
    return replace(
        found,
        overlap=True,
        index_heads=fields.integer("index_n_heads"),
        index_dim=dim,
        index_topk=fields.integer("index_topk"),
    )


def _read_rates(fields: ConfigFields, count: int) -> list[tuple[str, int]]:
    """(kind, tokens of an entry) of each layer. The release lists rates, transformers kinds."""
    rates = {SPARSE: 4, HEAVY: 128}
    given = fields.raw("compress_rates") or {}
    if not isinstance(given, dict) or set(given) - set(rates):
        raise fields.wrong("compress_rates", f"must be an object of {SPARSE} and {HEAVY}")
    for kind, rate in given.items():
        if type(rate) is not int or rate < 2:
            raise fields.wrong("compress_rates", f"{kind} must be an integer of at least 2")
        rates[kind] = rate
    kinds, listed = fields.raw("layer_types"), fields.raw("compress_ratios")
    fields.unused("index_n_heads", "index_head_dim", "index_topk")
    if listed is not None:
        by_rate = {0: SLIDING} | {rate: kind for kind, rate in rates.items()}
        if not isinstance(listed, list) or len(listed) < count:
            raise fields.wrong("compress_ratios", f"must be a list of {count} rates, one for each layer")
        for rate in listed[:count]:
            if rate not in by_rate:
                raise fields.wrong(
                    "compress_ratios", f"rate {rate!r} is not implemented; only {[*by_rate]} are"
                )
        found = [by_rate[rate] for rate in listed[:count]]
        if kinds is not None and list(kinds[:count]) != found:
            raise fields.wrong("layer_types", "contradicts compress_ratios")
        kinds = found
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {SLIDING, SPARSE, HEAVY}:
        raise fields.wrong(
            "compress_ratios" if kinds is None else "layer_types",
            f"must say of {count} layers which of {SLIDING}, {SPARSE}, {HEAVY} they are",
        )
    if set(kinds) == {SLIDING}:
        raise fields.wrong("layer_types", "must have layers with compressed attention")
    return [(kind, rates.get(kind, 0)) for kind in kinds]


def _read_routing(fields: ConfigFields) -> Routing:
    fields.choice("scoring_func", ("sqrtsoftplus",), default="sqrtsoftplus")
    fields.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    fields.choice("n_group", (1,), default=1)
    fields.choice("topk_group", (1,), default=1)
    return Routing(
        kind=RoutingKind.SQRT_SOFTPLUS_TOPK,
        renormalize=fields.choice("norm_topk_prob", (True,), default=True),
        scaling_factor=fields.number("routed_scaling_factor", 1.5),
    )


def _read_hash_layers(fields: ConfigFields, count: int) -> tuple[int, ...]:
    """The first so many, or those that a list of every layer's kind names."""
    kinds, first = fields.raw("mlp_layer_types"), fields.raw("num_hash_layers")
    if kinds is None:
        return tuple(range(min(count, fields.integer("num_hash_layers", 3, minimum=0))))
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {"hash_moe", "moe"}:
        raise fields.wrong("mlp_layer_types", f"must say 'hash_moe' or 'moe' of {count} layers")
    found = tuple(i for i, kind in enumerate(kinds) if kind == "hash_moe")
    if first is not None and found != tuple(range(first)):
        raise fields.wrong("mlp_layer_types", f"contradicts num_hash_layers ({first})")
    return found
