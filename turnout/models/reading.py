"""What the configurations of several families have in common, read with checks. Does not import torch.

A family's file calls these with its own names of fields and its defaults, and puts the results into a
`DecoderSpec`. All raise UserError for a field that is missing, malformed, or asks for what is not
implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from turnout.attention.kinds import AttentionSpec
from turnout.errors import UserError
from turnout.models.fields import ConfigFields
from turnout.models.interface import ModelShape
from turnout.models.spec import SharedExpert, Skipped, TensorNames
from turnout.moe.spec import MoESpec, Routing
from turnout.vocabulary import RoutingKind

SLIDING, FULL = "sliding_attention", "full_attention"  # in files


def read_shape(
    fields: ConfigFields,
    *,
    architecture: str,
    max_positions: int,
    head_dim: int | None = None,
    layer: AttentionSpec | None = None,
) -> ModelShape:
    """Sizes that the engine must know.

    max_positions: of the rope, which may be fewer than the file says.

    head_dim: what the file means without the field; None: hidden_size / num_attention_heads. layer: the
    attention of every layer; None: full, with the heads that the file says.
    """
    vocab_size, eos_token_ids = fields.integer("vocab_size"), fields.integers("eos_token_id", ())
    if any(token >= vocab_size for token in eos_token_ids):
        raise fields.wrong(
            "eos_token_id", f"must be below vocab_size ({vocab_size}), or generation never ends"
        )
    fields.choice("hidden_act", ("silu", "swish"), default="silu")  # two names of one function
    return ModelShape(
        architecture=architecture,
        attention=(layer or _read_full(fields, head_dim),) * fields.integer("num_hidden_layers"),
        hidden_size=fields.integer("hidden_size"),
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        eos_token_ids=eos_token_ids,
    )


def _read_full(fields: ConfigFields, head_dim: int | None) -> AttentionSpec:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    return AttentionSpec.full(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim or read_head_dim(fields)
    )


def read_head_dim(fields: ConfigFields) -> int:
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if fields.raw("head_dim") is None and hidden_size % num_heads:
        raise fields.wrong("num_attention_heads", f"must divide hidden_size ({hidden_size}), or set head_dim")
    return fields.integer("head_dim", hidden_size // num_heads)


def read_moe(
    fields: ConfigFields,
    *,
    experts: tuple[str, ...],
    routing: Routing,
    intermediate_size: str = "moe_intermediate_size",
) -> MoESpec:
    """experts: the names by which files count experts, the family's own first.

    Transformers 5 writes the fields of some families by other names than their publishers.
    """
    num_experts, top_k = _num_experts(fields, experts), fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.wrong("num_experts_per_tok", f"must not exceed the number of experts ({num_experts})")
    return MoESpec(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer(intermediate_size),
        num_experts=num_experts,
        top_k=top_k,
        routing=routing,
    )


def _num_experts(fields: ConfigFields, names: tuple[str, ...]) -> int:
    given = {name: fields.raw(name) for name in names if fields.raw(name) is not None}
    own = next(iter(given), names[0])
    for name, value in given.items():
        if value != given[own]:
            raise fields.wrong(own, f"contradicts {name} ({value!r})")
    return fields.integer(own)


def read_shared_experts(fields: ConfigFields, size: int) -> SharedExpert | None:
    """DeepSeek-V3's: `n_shared_experts` of `size` each, without a gate, as one expert of all their rows."""
    count = fields.integer("n_shared_experts", 1, minimum=0)
    return SharedExpert(intermediate_size=count * size, gated=False) if count else None


def read_grouped_moe(fields: ConfigFields, scaling_factor: float) -> MoESpec:
    """DeepSeek-V3's: sigmoid scores, the best of some groups of experts. scaling_factor: the family's own."""
    experts = ("n_routed_experts", "num_local_experts", "num_experts")
    return read_moe(fields, experts=experts, routing=_read_grouped_routing(fields, experts, scaling_factor))


def _read_grouped_routing(fields: ConfigFields, experts: tuple[str, ...], scaling_factor: float) -> Routing:
    fields.choice("scoring_func", ("sigmoid",), default="sigmoid")
    fields.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    num_experts = _num_experts(fields, experts)
    n_group = fields.integer("n_group", 1)
    topk_group = fields.integer("topk_group", n_group)
    if num_experts % n_group:
        raise fields.wrong("n_group", f"must divide the number of experts ({num_experts})")
    if topk_group > n_group:
        raise fields.wrong("topk_group", f"must not exceed n_group ({n_group})")
    return Routing(
        kind=RoutingKind.SIGMOID_TOPK,
        renormalize=fields.flag("norm_topk_prob", True),
        n_group=n_group,
        topk_group=topk_group,
        scaling_factor=fields.number("routed_scaling_factor", scaling_factor),
    )


def read_sparse_step(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """MoE layers of the Qwen families: every `decoder_sparse_step`-th one but for `mlp_only_layers`."""
    every, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers", ())
    layers = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0)
    if not layers:
        raise UserError(
            f"{fields.where}: none of the {num_layers} layers is an MoE layer "
            f"(decoder_sparse_step = {every}, mlp_only_layers = {list(dense)})"
        )
    return layers


def read_first_dense(fields: ConfigFields, num_layers: int, default: int) -> tuple[int, ...]:
    """MoE layers of files that say how many layers before them are dense, or list every layer's kind."""
    dense = fields.integer("first_k_dense_replace", default, minimum=0)
    kinds = fields.raw("mlp_layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}
    ):
        raise fields.wrong("mlp_layer_types", f"must say 'dense' or 'sparse' of {num_layers} layers")
    layers = tuple(range(dense, num_layers))
    if kinds is not None:
        listed = tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
        if fields.raw("first_k_dense_replace") is not None and listed != layers:
            raise fields.wrong("mlp_layer_types", f"contradicts first_k_dense_replace ({dense})")
        layers = listed
    if not layers:
        name = "first_k_dense_replace" if kinds is None else "mlp_layer_types"
        raise fields.wrong(name, f"leaves none of the {num_layers} layers an MoE layer")
    return layers


def read_dense_size(
    fields: ConfigFields, moe_layers: tuple[int, ...], num_layers: int, name: str = "intermediate_size"
) -> int:
    """The size of the layers that are not MoE layers; 0 where there are none and the file does not say."""
    size = fields.integer(name, 0, minimum=0)
    if len(moe_layers) < num_layers and not size:
        raise fields.wrong(name, "must be the size of the layers that are not MoE layers")
    return size


def read_draft_layers(fields: ConfigFields, names: TensorNames, num_layers: int) -> tuple[Skipped, ...]:
    """Layers behind the last one, which draft tokens for speculative decoding."""
    count = fields.integer("num_nextn_predict_layers", 0, minimum=0)
    return tuple(
        Skipped(what="draft layer (multi-token prediction)", prefix=f"{names.layer(num_layers + i)}.")
        for i in range(count)
    )


def check_no_windows(fields: ConfigFields, max_positions: int) -> None:
    """Of a family whose layers have none: a window that spans the whole context changes nothing."""
    flagged, window = fields.flag("use_sliding_window", False), fields.raw("sliding_window")
    sliding = flagged or any(kind != FULL for kind in fields.raw("layer_types") or [])
    if sliding and not (type(window) is int and window >= max_positions):
        raise fields.wrong(
            "sliding_window" if flagged else "layer_types",
            "layers with a sliding window are not implemented for this family. Set max_position_embeddings "
            f"to at most the window (now {max_positions}), or set use_sliding_window to false if the model "
            "was trained without it",
        )


def read_windows(fields: ConfigFields, shape: ModelShape, default: Sequence[str]) -> ModelShape:
    """The same with a window in each layer that has one by `layer_types`, or else by `default`.

    One that spans the whole context changes nothing, and is none.
    """
    num_layers, kinds = shape.num_layers, fields.raw("layer_types")
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise fields.wrong("layer_types", f"must be a list of {num_layers} kinds, one for each layer")
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise fields.wrong("layer_types", f"{kind!r} is not implemented; only {SLIDING} and {FULL} are")
    window = fields.integer("sliding_window") if SLIDING in kinds else 0
    fields.unused("sliding_window")
    narrow = window < shape.max_position_embeddings
    layers = (
        layer.sliding(window) if kind == SLIDING and narrow else layer
        for layer, kind in zip(shape.attention, kinds, strict=True)
    )
    return replace(shape, attention=tuple(layers))
