"""How many parameters a decoder has next to its routed experts, as plans need to know. Does not import torch.

Legend: H hidden size, L layers, q, kv rows of all query heads, and of all key and value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from turnout.attention.kinds import AttentionSpec, CompressedSpec, DeltaNetSpec, SparseLatentSpec
from turnout.models.interface import DenseParameters, ModelDescription
from turnout.models.spec import DecoderSpec
from turnout.vocabulary import DeltaRows, QKNorm


def described(spec: DecoderSpec, is_fp8: Callable[[str], bool]) -> ModelDescription:
    """is_fp8: whether the checkpoint stores the linear layer of this name in FP8."""
    names = spec.names
    return ModelDescription(
        shape=spec.shape,
        moe=spec.moe,
        moe_layers=spec.moe_layers,
        experts_prefix=f"{names.layer('{}')}.{names.moe}.{names.experts}",
        dense=_parameters(spec),
        dense_in_fp8=_parameters_in_fp8(spec, is_fp8),
        draft_moe=spec.draft_moe,
    )


class _Counts(NamedTuple):
    """Of a layer's attention, as in `DenseParameters`; in_float32: of those that are replicated."""

    queries: int = 0
    keys_values: int = 0
    replicated: int = 0
    in_float32: int = 0


def _parameters(spec: DecoderSpec) -> DenseParameters:
    shape, moe, H, L = spec.shape, spec.moe, spec.shape.hidden_size, spec.shape.num_layers
    counts = [_attention(spec, layer) for layer in shape.attention]
    queries, keys_values, replicated, in_float32 = map(sum, zip(*counts, strict=True))
    norms = H * (1 + 2 * L)
    # Tables of experts by token id, in four bytes; and streams.
    exact = len(spec.hash_layers) * shape.vocab_size * moe.top_k
    if spec.streams:
        S = spec.streams.count
        exact += 2 * L * (S * (S + 2) * (S * H + 1) + 3) + S * (S * H + 1) + 1
    num_moe, shared = len(spec.moe_layers), spec.shared_expert
    corrections = (num_moe - len(spec.hash_layers)) * moe.num_experts * spec.correction_bias
    routers = num_moe * moe.num_experts * H
    replicated += norms + exact + corrections + routers + L * H * spec.out_bias
    replicated += num_moe * (moe.num_experts * spec.router_bias + (H if shared and shared.gated else 0))
    replicated += (2 * H + 3) * H if spec.drafts else 0  # a projection and norms
    in_float32 += norms * spec.norms_around_one + exact + corrections + routers * spec.router_float32
    return DenseParameters(
        vocabulary=shape.vocab_size * H * (1 if spec.tied_embeddings else 2),
        queries=queries,
        keys_values=keys_values,
        mlps=(L - num_moe) * 3 * spec.dense_intermediate_size * H,
        shared_experts=num_moe * 3 * shared.intermediate_size * H if shared else 0,
        replicated=replicated,
        in_float32=in_float32,
    )


def _attention(spec: DecoderSpec, layer: AttentionSpec) -> _Counts:
    if isinstance(layer, DeltaNetSpec):
        return _delta_net(spec, layer)
    if isinstance(layer, CompressedSpec):
        return _compressed(spec, layer)
    if spec.latent:
        return _latent(layer, spec.shape.hidden_size, spec.latent.query_rank)
    H = spec.shape.hidden_size
    q, k = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    norms = {QKNorm.HEAD: 2 * layer.head_dim, QKNorm.WHOLE: q + k}.get(spec.qk_norm, 0)
    return _Counts(
        queries=q * (H * (1 + spec.output_gate) + spec.qkv_bias) + layer.num_heads * layer.value_dim * H,
        keys_values=(k + layer.num_kv_heads * layer.value_dim) * (H + spec.qkv_bias),
        replicated=norms + layer.num_heads * layer.sinks,
        in_float32=norms * spec.norms_around_one,
    )


def _delta_net(spec: DecoderSpec, layer: DeltaNetSpec) -> _Counts:
    outer = (layer.mixed + layer.num_heads * layer.value_dim) * spec.shape.hidden_size
    return _Counts(
        queries=outer + layer.channels * layer.conv_width,
        replicated=2 * layer.num_heads + layer.value_dim,
        in_float32=2 * layer.num_heads,
    )


def _compressed(spec: DecoderSpec, layer: CompressedSpec) -> _Counts:
    assert spec.compressed is not None, "layers of compressed attention have projections"
    H, rank, output = spec.shape.hidden_size, spec.compressed.query_rank, spec.compressed.output_rank
    entries = layer.open_dim * H + layer.open_dim // 2 * layer.rate
    entries += (layer.head_dim + layer.index_dim) * (layer.rate > 0)
    return _Counts(
        queries=layer.num_heads * layer.head_dim * (rank + output) + layer.output_groups * output * H,
        replicated=(rank + layer.head_dim) * (H + 1)
        + layer.num_heads
        + entries
        + layer.index_heads * (layer.index_dim * rank + H),
    )


def _latent(layer: AttentionSpec, H: int, rank: int) -> _Counts:
    made = layer.head_dim - layer.rope_dim + layer.value_dim
    index = weights = 0
    if isinstance(layer, SparseLatentSpec) and not layer.shares_choice:
        heads, dim = layer.index_heads, layer.index_dim
        index, weights = heads * dim * rank + dim * (H + 2), heads * H
    return _Counts(
        queries=layer.num_heads
        * (layer.head_dim * (rank or H) + made * layer.latent_dim + layer.value_dim * H),
        keys_values=(layer.latent_dim + layer.rope_dim) * H,
        replicated=rank * H + rank + layer.latent_dim + index + weights,
        in_float32=weights,
    )


def _parameters_in_fp8(spec: DecoderSpec, is_fp8: Callable[[str], bool]) -> DenseParameters:
    """Of the matrices that `Weights.dense` reads, each of layers that read the same input."""
    H, names, mlps, shared_experts, counts = spec.shape.hidden_size, spec.names, 0, 0, [_Counts()]

    def stored(count: int, prefix: str, *modules: str) -> int:
        return count * all(is_fp8(f"{prefix}.{module}") for module in modules)

    def gated_mlp(inner: int, prefix: str) -> int:
        gate, wide, down = names.gate_up_down
        return stored(2 * inner * H, prefix, gate, wide) + stored(inner * H, prefix, down)

    for i, layer in enumerate(spec.shape.attention):
        prefix = spec.layer_prefix(i)
        if i not in spec.moe_layers:
            mlps += gated_mlp(spec.dense_intermediate_size, f"{prefix}.{names.dense}")
        elif spec.shared_expert:
            inner = spec.shared_expert.intermediate_size
            shared_experts += gated_mlp(inner, f"{prefix}.{names.moe}.{names.shared_expert}")
        if isinstance(layer, DeltaNetSpec):
            counts.append(_delta_net_in_fp8(spec, layer, f"{prefix}.{names.recurrent}", stored))
        elif isinstance(layer, CompressedSpec):
            counts.append(_compressed_in_fp8(spec, layer, f"{prefix}.{names.attention}", stored))
        else:
            counts.append(_attention_in_fp8(spec, layer, f"{prefix}.self_attn", stored))
    queries, keys_values, replicated, _ = map(sum, zip(*counts, strict=True))
    return DenseParameters(
        queries=queries,
        keys_values=keys_values,
        mlps=mlps,
        shared_experts=shared_experts,
        replicated=replicated,
    )


def _delta_net_in_fp8(
    spec: DecoderSpec, layer: DeltaNetSpec, prefix: str, stored: Callable[..., int]
) -> _Counts:
    """stored: as of `_attention_in_fp8`."""
    H, inner = spec.shape.hidden_size, layer.num_heads * layer.value_dim
    by_kind = spec.delta_rows == DeltaRows.BY_KIND
    large = ("in_proj_qkv", "in_proj_z") if by_kind else ("in_proj_qkvz",)
    small = ("in_proj_b", "in_proj_a") if by_kind else ("in_proj_ba",)
    return _Counts(
        queries=stored((layer.channels + inner) * H, prefix, *large)
        + stored(2 * layer.num_heads * H, prefix, *small)
        + stored(inner * H, prefix, "out_proj")
    )


def _compressed_in_fp8(
    spec: DecoderSpec, layer: CompressedSpec, prefix: str, stored: Callable[..., int]
) -> _Counts:
    """stored: as of `_attention_in_fp8`. What reads the same input as compressors, which are not quantised,
    and what is multiplied by groups are decoded while they load."""
    assert spec.compressed is not None, "layers of compressed attention have projections"
    H, rank, output = spec.shape.hidden_size, spec.compressed.query_rank, spec.compressed.output_rank
    return _Counts(
        queries=stored(layer.num_heads * layer.head_dim * rank, prefix, "wq_b")
        + stored(layer.output_groups * output * H, prefix, "wo_b"),
        replicated=stored(layer.index_heads * layer.index_dim * rank, prefix, "indexer.wq_b"),
    )


def _attention_in_fp8(
    spec: DecoderSpec, layer: AttentionSpec, prefix: str, stored: Callable[..., int]
) -> _Counts:
    """stored(count, prefix, *modules): `count`, if all of these are in FP8, else 0."""
    H, q = spec.shape.hidden_size, layer.num_heads * layer.head_dim
    out = stored(layer.num_heads * layer.value_dim * H, prefix, "o_proj")
    if spec.latent is None:
        together = "q_proj", "k_proj", "v_proj"
        kv = layer.num_kv_heads * (layer.head_dim + layer.value_dim)
        return _Counts(
            queries=out + stored(q * H * (1 + spec.output_gate), prefix, *together),
            keys_values=stored(kv * H, prefix, *together),
        )
    rank = spec.latent.query_rank
    down = "q_a_proj" if rank else "q_proj", "kv_a_proj_with_mqa"
    replicated = stored(rank * H, prefix, *down)
    if isinstance(layer, SparseLatentSpec) and not layer.shares_choice:
        replicated += stored(layer.index_heads * layer.index_dim * rank, prefix, "indexer.wq_b")
        replicated += stored(layer.index_dim * H, prefix, "indexer.wk")
    return _Counts(
        queries=out + (stored(q * rank, prefix, "q_b_proj") if rank else stored(q * H, prefix, *down)),
        keys_values=stored((layer.latent_dim + layer.rope_dim) * H, prefix, *down),
        replicated=replicated,
    )
