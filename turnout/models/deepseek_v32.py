"""DeepSeek-V3.2: DeepSeek-V3 with sparse latent attention: an indexer chooses what is attended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields as fields_of
from dataclasses import replace

from turnout.attention.kinds import SparseLatentSpec
from turnout.models.deepseek_v3 import read_deepseek
from turnout.models.fields import ConfigFields
from turnout.models.spec import DecoderSpec, LatentProjections

FULL, SHARED = "full", "shared"


def read_spec(fields: ConfigFields) -> DecoderSpec:
    spec = read_deepseek(fields, architecture="DeepseekV32ForCausalLM", drafts=False)
    return with_indexers(fields, spec, interleaved=False)


def with_indexers(
    fields: ConfigFields, spec: DecoderSpec, *, interleaved: bool, kinds: Sequence[str] = ()
) -> DecoderSpec:
    """`spec` with sparse attention in all layers.

    interleaved: whether the indexer rotates pairs of neighbours. kinds: FULL or SHARED of each layer; none:
    all are FULL.
    """
    fields.choice("indexer_rope_interleave", (interleaved,), default=interleaved)
    fields.unused("layer_types")  # "indexed_attention" of each layer, as transformers writes it
    rank = fields.integer("q_lora_rank")  # index queries are made of the same vector as queries
    layer = spec.shape.attention[0]
    dim = fields.integer("index_head_dim")
    if dim < layer.rope_dim:
        raise fields.wrong("index_head_dim", f"must be at least qk_rope_head_dim ({layer.rope_dim})")
    common = {field.name: getattr(layer, field.name) for field in fields_of(layer)} | {
        "kind": SparseLatentSpec.kind
    }
    full = SparseLatentSpec(
        **common,
        index_heads=fields.integer("index_n_heads"),
        index_dim=dim,
        index_topk=fields.integer("index_topk"),
    )
    kinds = kinds or [FULL] * spec.shape.num_layers
    attention = tuple(full if kind == FULL else replace(full, shares_choice=True) for kind in kinds)
    return replace(
        spec,
        shape=replace(spec.shape, attention=attention),
        latent=LatentProjections(query_rank=rank, index_interleaved=interleaved),
    )
