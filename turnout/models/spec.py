"""A decoder as its `config.json` describes it: everything an architecture may differ in, as data.

An architecture's file is a function from the config's fields to a `DecoderSpec`; `decoder.py` builds the
model from it. Does not import torch, so that a plan costs no more than reading a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from turnout.attention.kinds import DeltaNetSpec
from turnout.models.interface import ModelShape
from turnout.models.rope import Rope
from turnout.moe.spec import MoESpec
from turnout.vocabulary import DeltaRows, QKNorm

COMPRESSED_ROPE = "compressed"  # what layers of compressed attention that have entries declare as their rope


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """What checkpoints of a family call their tensors. The defaults are Qwen3-MoE's.

    `model` and `head` are whole prefixes, the former perhaps empty; `moe`, `dense`, `attention` and norms
    belong to a layer; router, experts and what goes with them to its `moe`.
    """

    model: str = "model"  # {model}.embed_tokens, {model}.layers.0, {model}.norm
    head: str = "lm_head"
    moe: str = "mlp"
    dense: str = "mlp"
    router: str = "gate"
    correction_bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    shared_expert: str = "shared_expert"
    recurrent: str = "linear_attn"  # of layers of Gated DeltaNet
    hash_table: str = "gate.tid2eid"
    attention: str = "self_attn"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    embedding: str = "embed_tokens"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of gated MLPs

    def layer(self, i: int | str) -> str:
        return self.outer(f"layers.{i}")

    def outer(self, name: str) -> str:
        """Of what is in no layer."""
        return f"{self.model}.{name}" if self.model else name


@dataclass(frozen=True, kw_only=True)
class DraftNames:
    """What a draft layer's tensors are called: whole prefixes. layer: of those that any layer has."""

    layer: str
    token_norm: str
    hidden_norm: str
    projection: str
    norm: str

    @classmethod
    def below(cls, layer: str) -> DraftNames:
        """DeepSeek's names, all below the layer's own prefix."""
        return cls(
            layer=layer,
            token_norm=f"{layer}.enorm",
            hidden_norm=f"{layer}.hnorm",
            projection=f"{layer}.eh_proj",
            norm=f"{layer}.shared_head.norm",
        )


@dataclass(frozen=True, kw_only=True)
class SharedExpert:
    """A gated MLP of every MoE layer that sees every token. gated: a sigmoid gate of its own scales it."""

    intermediate_size: int
    gated: bool


@dataclass(frozen=True, kw_only=True)
class LatentProjections:
    """Where queries and the latent vectors of latent attention come from. query_rank: of the vector that
    queries are made from; 0: they are made from the hidden state. index_interleaved: what an indexer rotates
    it rotates in pairs of neighbours, not of halves."""

    query_rank: int
    index_interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class CompressedProjections:
    """Of layers of compressed attention. query_rank: of the vector that queries are made of; output_rank: of
    what each group of heads is projected to."""

    query_rank: int
    output_rank: int


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """Residual streams (streams.py). iterations: of Sinkhorn's; eps: in its sums and of the weights."""

    count: int
    iterations: int
    eps: float


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Tensors that a checkpoint holds for what is not served. prefix: of their names."""

    what: str  # in words, for the log
    prefix: str


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder that `decoder.py` can build; what most families do not have is off by default.

    Heads of layers whose rope is `rope.NOPE` are not rotated, and not normed where the norm is `QKNorm.UNIT`.
    dense_intermediate_size: of the layers that are not MoE layers.
    router_bias: every router has a bias [E], part of its logits.
    correction_bias: every router has a float32 bias [E] that moves its choice.
    latent: where layers declare latent attention.
    compressed: where layers declare compressed attention; compressed_rope: of those with entries, by the name
    COMPRESSED_ROPE. streams: of the residual; None: one. hash_layers: MoE layers whose experts a table has by
    token id. mlp_limit: of the products that a shared expert's gate is applied to.
    renames: patterns of names in some files, and what `names` has in their place.
    router_float32: logits are computed in float32 whatever the compute type.
    norms_around_one: norms multiply by 1 + weight, in float32.
    output_gate: rows of `q_proj` are D of a head's query, then D of a gate of its output.
    delta_rows: how projections of recurrent layers are stored.
    draft_layers: behind the last layer, each of which drafts a token from the one before. drafts: the last
    layer of `shape` is the first of those. draft_names: where they are not one more layer's. draft_moe: of
    that layer, where its experts are in another format than `moe`.
    """

    shape: ModelShape
    moe: MoESpec
    moe_layers: tuple[int, ...]
    rope: Rope
    norm_eps: float
    names: TensorNames = field(default_factory=TensorNames)
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    latent: LatentProjections | None = None
    compressed: CompressedProjections | None = None
    compressed_rope: Rope | None = None
    streams: StreamSpec | None = None
    hash_layers: tuple[int, ...] = ()
    mlp_limit: float | None = None
    renames: tuple[tuple[str, str], ...] = ()
    dense_intermediate_size: int = 0
    shared_expert: SharedExpert | None = None
    router_bias: bool = False
    correction_bias: bool = False
    router_float32: bool = False
    norms_around_one: bool = False
    output_gate: bool = False
    delta_rows: DeltaRows = DeltaRows.BY_KIND
    tied_embeddings: bool = False
    skipped: tuple[Skipped, ...] = ()
    draft_layers: int = 0
    draft_names: DraftNames | None = None
    drafts: bool = False
    draft_moe: MoESpec | None = None

    def with_draft_layer(self) -> DecoderSpec:
        """With the first draft layer, an MoE layer like the last one with attention, as one more layer."""
        attention, L = self.shape.attention, self.shape.num_layers
        last = next(layer for layer in reversed(attention) if not isinstance(layer, DeltaNetSpec))
        names = self.draft_names or DraftNames.below(self.names.layer(L))
        return replace(
            self,
            shape=replace(self.shape, attention=(*attention, last)),
            moe_layers=(*self.moe_layers, L),
            skipped=tuple(part for part in self.skipped if not f"{names.layer}.".startswith(part.prefix)),
            draft_names=names,
            drafts=True,
        )

    def layer_prefix(self, i: int) -> str:
        """Of the tensors of layer `i` of `shape`."""
        return self.draft_names.layer if self.is_draft(i) and self.draft_names else self.names.layer(i)

    def is_draft(self, i: int) -> bool:
        """Whether layer `i` of `shape` is the draft layer."""
        return self.drafts and i == self.shape.num_layers - 1

    def moe_of(self, i: int) -> MoESpec:
        """Of MoE layer `i` of `shape`."""
        return self.draft_moe if self.is_draft(i) and self.draft_moe else self.moe

    def experts_prefix(self, i: int) -> str:
        """Of the routed experts of layer `i`."""
        return f"{self.layer_prefix(i)}.{self.names.moe}.{self.names.experts}"
