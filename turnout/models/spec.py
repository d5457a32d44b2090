"""A decoder as its `config.json` describes it: everything an architecture may differ in, as data.

An architecture's file is a function from the config's fields to a `DecoderSpec`; `decoder.py` builds the
model from it. Does not import torch, so that a plan costs no more than reading a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnout.errors import UserError
from turnout.models.fields import ConfigFields
from turnout.models.interface import DenseParameters, ModelDescription, ModelShape
from turnout.models.rope import Rope, read_rope
from turnout.moe.spec import MoESpec, Routing
from turnout.vocabulary import RoutingKind


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A model of this family. An intermediate size of 0 says that the model has no such part."""

    shape: ModelShape
    moe: MoESpec
    moe_layers: tuple[int, ...]
    rope: Rope
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    dense_intermediate_size: int  # of the layers that are not MoE layers
    shared_intermediate_size: int  # of the shared expert
    tied_embeddings: bool

    def describe(self) -> ModelDescription:
        return ModelDescription(
            shape=self.shape,
            moe=self.moe,
            moe_layers=self.moe_layers,
            dense=self._dense_parameters(),
        )

    def _dense_parameters(self) -> DenseParameters:
        shape, H, L = self.shape, self.shape.hidden_size, self.shape.num_layers
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        num_moe = len(self.moe_layers)
        norms = H + L * (2 * H + 2 * shape.head_dim * self.qk_norm)
        gates = num_moe * H * (self.moe.num_experts + bool(self.shared_intermediate_size))
        return DenseParameters(
            vocabulary=shape.vocab_size * H * (1 if self.tied_embeddings else 2),
            queries=L * q * (2 * H + self.qkv_bias),
            keys_values=L * 2 * kv * (H + self.qkv_bias),
            mlps=(L - num_moe) * 3 * self.dense_intermediate_size * H,
            shared_experts=num_moe * 3 * self.shared_intermediate_size * H,
            replicated=norms + gates + L * H * self.out_bias,
        )


def read_decoder(
    fields: ConfigFields,
    *,
    architecture: str,
    qkv_bias: bool,
    out_bias: bool,
    qk_norm: bool,
    shared_intermediate_size: int,
) -> DecoderSpec:
    """What Qwen2-MoE and Qwen3-MoE configurations have in common; the keywords are what they differ in.

    Raises UserError for a field that is missing, malformed, or asks for what is not implemented.
    """
    fields.choice("hidden_act", ("silu", "swish"), default="silu")  # two names of one function
    shape, rope = _read_shape(fields, architecture)
    _check_sliding_window(fields, rope.max_positions)
    moe_layers = _read_moe_layers(fields, shape.num_layers)
    dense_intermediate_size = fields.integer("intermediate_size", 0, minimum=0)
    if len(moe_layers) < shape.num_layers and not dense_intermediate_size:
        raise fields.wrong("intermediate_size", "must be the size of the layers that are not MoE layers")
    return DecoderSpec(
        shape=shape,
        moe=_read_moe(fields, shape.hidden_size),
        moe_layers=moe_layers,
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        dense_intermediate_size=dense_intermediate_size,
        shared_intermediate_size=shared_intermediate_size,
        tied_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _read_shape(fields: ConfigFields, architecture: str) -> tuple[ModelShape, Rope]:
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    if fields.raw("head_dim") is None and hidden_size % num_heads:
        raise fields.wrong("num_attention_heads", f"must divide hidden_size ({hidden_size}), or set head_dim")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    vocab_size, eos_token_ids = fields.integer("vocab_size"), fields.integers("eos_token_id", ())
    if any(token >= vocab_size for token in eos_token_ids):
        raise fields.wrong(
            "eos_token_id", f"must be below vocab_size ({vocab_size}), or generation never ends"
        )
    rope = read_rope(fields, head_dim=head_dim)
    shape = ModelShape(
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        max_position_embeddings=rope.max_positions,
        eos_token_ids=eos_token_ids,
    )
    return shape, rope


def _read_moe(fields: ConfigFields, hidden_size: int) -> MoESpec:
    num_experts, top_k = _read_num_experts(fields), fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise fields.wrong("num_experts_per_tok", f"must not exceed the number of experts ({num_experts})")
    return MoESpec(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("moe_intermediate_size"),
        num_experts=num_experts,
        top_k=top_k,
        routing=Routing(kind=RoutingKind.SOFTMAX_TOPK, renormalize=fields.flag("norm_topk_prob", False)),
    )


def _read_num_experts(fields: ConfigFields) -> int:
    """Transformers 5 writes Qwen3-MoE's `num_experts` as `num_local_experts`."""
    first, second = fields.raw("num_experts"), fields.raw("num_local_experts")
    if first is not None and second is not None and first != second:
        raise fields.wrong("num_experts", f"contradicts num_local_experts ({second!r})")
    return fields.integer("num_experts" if first is not None or second is None else "num_local_experts")


def _read_moe_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    every, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers", ())
    layers = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0)
    if not layers:
        raise UserError(
            f"{fields.where}: none of the {num_layers} layers is an MoE layer "
            f"(decoder_sparse_step = {every}, mlp_only_layers = {list(dense)})"
        )
    return layers


def _check_sliding_window(fields: ConfigFields, max_positions: int) -> None:
    """A window that spans the whole context changes nothing; a shorter one is not implemented."""
    enabled, window = fields.flag("use_sliding_window", False), fields.raw("sliding_window")
    layer_types = fields.raw("layer_types") or []
    sliding = enabled or any(kind != "full_attention" for kind in layer_types)
    if sliding and not (type(window) is int and window >= max_positions):
        raise fields.wrong(
            "sliding_window" if enabled else "layer_types",
            f"sliding-window attention is not implemented. Set max_position_embeddings to at most the window "
            f"(now {max_positions}), or set use_sliding_window to false if the model was trained without it",
        )
