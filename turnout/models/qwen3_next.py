"""Qwen3-Next, Qwen3-Coder-Next: three of four layers are Gated DeltaNet, the others attention with a gate."""

from __future__ import annotations

from dataclasses import replace

from turnout.attention.kinds import AttentionSpec, DeltaNetSpec
from turnout.models.fields import ConfigFields
from turnout.models.reading import read_dense_size, read_head_dim, read_moe, read_shape, read_sparse_step
from turnout.models.rope import read_rope
from turnout.models.spec import DecoderSpec, DraftNames, SharedExpert, Skipped
from turnout.moe.spec import Routing
from turnout.vocabulary import DeltaRows, QKNorm, RoutingKind

LINEAR, FULL = "linear_attention", "full_attention"
DRAFT_LAYER = Skipped(what="draft layer (multi-token prediction)", prefix="mtp.")
DRAFT_NAMES = DraftNames(
    layer="mtp.layers.0",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    norm="mtp.norm",
)


def read_spec(fields: ConfigFields) -> DecoderSpec:
    renormalize = fields.flag("norm_topk_prob", True)
    spec = read_hybrid(fields, architecture="Qwen3NextForCausalLM", renormalize=renormalize)
    tied = fields.flag("tie_word_embeddings", False)
    return replace(spec, delta_rows=DeltaRows.BY_KEY_HEAD, tied_embeddings=tied)


def read_hybrid(fields: ConfigFields, *, architecture: str, renormalize: bool) -> DecoderSpec:
    """What the files of Qwen3-Next and Qwen3.5-MoE have in common."""
    fields.choice("attention_bias", (False,), default=False)
    fields.choice("attn_output_gate", (True,), default=True)
    fields.choice("use_sliding_window", (False,), default=False)
    fields.choice("mamba_ssm_dtype", ("float32",), default="float32")
    draft_layers = fields.integer("mtp_num_hidden_layers", 1, minimum=0)
    if fields.flag("mtp_use_dedicated_embeddings", False):  # not implemented; the model works without
        draft_layers = 0
    head_dim = read_head_dim(fields)
    rope = read_rope(fields, head_dim=head_dim, partial=0.25, mrope=True)
    shape = read_shape(fields, architecture=architecture, max_positions=rope.max_positions, head_dim=head_dim)
    recurrent, kinds = _read_delta_net(fields), _read_layer_types(fields, shape.num_layers)
    layers: tuple[AttentionSpec, ...] = tuple(
        recurrent if kind == LINEAR else full for kind, full in zip(kinds, shape.attention, strict=True)
    )
    moe_layers = read_sparse_step(fields, shape.num_layers)
    routing = Routing(kind=RoutingKind.SOFTMAX_TOPK, renormalize=renormalize)
    shared = fields.integer("shared_expert_intermediate_size", minimum=0)
    return DecoderSpec(
        shape=replace(shape, attention=layers),
        moe=read_moe(fields, experts=("num_experts", "num_local_experts"), routing=routing),
        moe_layers=moe_layers,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qk_norm=QKNorm.HEAD,
        dense_intermediate_size=read_dense_size(fields, moe_layers, shape.num_layers),
        shared_expert=SharedExpert(intermediate_size=shared, gated=True) if shared else None,
        norms_around_one=True,
        output_gate=True,
        skipped=(DRAFT_LAYER,),
        draft_layers=draft_layers,
        draft_names=DRAFT_NAMES,
    )


def _read_delta_net(fields: ConfigFields) -> DeltaNetSpec:
    key_heads = fields.integer("linear_num_key_heads")
    value_heads = fields.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise fields.wrong("linear_num_value_heads", f"must be a multiple of key heads ({key_heads})")
    key_dim = fields.integer("linear_key_head_dim")
    return DeltaNetSpec(
        num_heads=value_heads,
        num_kv_heads=key_heads,
        head_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim"),
        scale=key_dim**-0.5,
        conv_width=fields.integer("linear_conv_kernel_dim", minimum=2),
    )


def _read_layer_types(fields: ConfigFields, num_layers: int) -> list[str]:
    """Of each layer: listed, or every `full_attention_interval`-th one has attention."""
    every = fields.integer("full_attention_interval", 4)
    counted = [LINEAR if (i + 1) % every else FULL for i in range(num_layers)]
    kinds = fields.raw("layer_types")
    kinds = counted if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.wrong("layer_types", f"must be a list of {num_layers} kinds, one for each layer")
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise fields.wrong("layer_types", f"{kind!r} is not implemented; only {LINEAR} and {FULL} are")
    if FULL not in kinds:
        raise fields.wrong("layer_types", f"a model without a layer of {FULL} is not implemented")
    return kinds
