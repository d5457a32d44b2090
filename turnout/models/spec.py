"""A decoder as its `config.json` describes it: everything an architecture may differ in, as data.

An architecture's file is a function from the config's fields to a `DecoderSpec`; `decoder.py` builds the
model from it. Does not import torch, so that a plan costs no more than reading a file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from turnout.attention.kinds import CompressedSpec, DeltaNetSpec, SparseLatentSpec
from turnout.models.interface import DenseParameters, ModelDescription, ModelShape
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
    queries are made from; 0: they are made from the hidden state. norm_eps: of the norms of both vectors.
    index_interleaved: what an indexer rotates it rotates in pairs of neighbours, not of halves."""

    query_rank: int
    norm_eps: float = 1e-6  # whatever the other norms have
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

    def describe(self, is_fp8: Callable[[str], bool] = lambda _: False) -> ModelDescription:
        """is_fp8: whether the checkpoint stores the linear layer of this name in FP8."""
        return ModelDescription(
            shape=self.shape,
            moe=self.moe,
            moe_layers=self.moe_layers,
            experts_prefix=f"{self.names.layer('{}')}.{self.names.moe}.{self.names.experts}",
            dense=self._dense_parameters(),
            dense_in_fp8=self._parameters_in_fp8(is_fp8),
            draft_moe=self.draft_moe,
        )

    def _parameters_in_fp8(self, is_fp8: Callable[[str], bool]) -> DenseParameters:
        """Of the matrices that `Weights.dense` reads, each of layers that read the same input."""
        H, queries, keys_values, mlps, shared_experts, replicated = self.shape.hidden_size, 0, 0, 0, 0, 0

        def stored(count: int, prefix: str, *modules: str) -> int:
            return count * all(is_fp8(f"{prefix}.{module}") for module in modules)

        def gated_mlp(inner: int, prefix: str) -> int:
            gate, wide, down = self.names.gate_up_down
            return stored(2 * inner * H, prefix, gate, wide) + stored(inner * H, prefix, down)

        for i, layer in enumerate(self.shape.attention):
            prefix, names = self.layer_prefix(i), self.names
            if i not in self.moe_layers:
                mlps += gated_mlp(self.dense_intermediate_size, f"{prefix}.{names.dense}")
            elif self.shared_expert:
                inner = self.shared_expert.intermediate_size
                shared_experts += gated_mlp(inner, f"{prefix}.{names.moe}.{names.shared_expert}")
            if isinstance(layer, DeltaNetSpec | CompressedSpec):
                continue  # decoded while they load
            prefix, q = f"{prefix}.self_attn", layer.num_heads * layer.head_dim
            queries += stored(layer.num_heads * layer.value_dim * H, prefix, "o_proj")
            if self.latent:
                rank = self.latent.query_rank
                down = "q_a_proj" if rank else "q_proj", "kv_a_proj_with_mqa"
                keys_values += stored((layer.latent_dim + layer.rope_dim) * H, prefix, *down)
                replicated += stored(rank * H, prefix, *down)
                queries += stored(q * rank, prefix, "q_b_proj") if rank else stored(q * H, prefix, *down)
                if isinstance(layer, SparseLatentSpec) and not layer.shares_choice:
                    dim = layer.index_dim
                    replicated += stored(layer.index_heads * dim * rank, prefix, "indexer.wq_b")
                    replicated += stored(dim * H, prefix, "indexer.wk")
                continue
            together = "q_proj", "k_proj", "v_proj"
            queries += stored(q * H * (1 + self.output_gate), prefix, *together)
            kv = layer.num_kv_heads * (layer.head_dim + layer.value_dim)
            keys_values += stored(kv * H, prefix, *together)
        return DenseParameters(
            queries=queries,
            keys_values=keys_values,
            mlps=mlps,
            shared_experts=shared_experts,
            replicated=replicated,
        )

    def _dense_parameters(self) -> DenseParameters:
        shape, H, L = self.shape, self.shape.hidden_size, self.shape.num_layers
        num_moe, shared = len(self.moe_layers), self.shared_expert
        queries = keys_values = small = wide = 0
        for layer in shape.attention:
            if isinstance(layer, DeltaNetSpec):
                inner = layer.num_heads * layer.value_dim
                queries += (layer.mixed + inner) * H + layer.channels * layer.conv_width
                wide += 2 * layer.num_heads
                small += 2 * layer.num_heads + layer.value_dim
                continue
            if isinstance(layer, CompressedSpec) and self.compressed:
                rank, width = self.compressed.query_rank, layer.num_heads * layer.head_dim
                inner = layer.output_groups * self.compressed.output_rank
                queries += width * (rank + self.compressed.output_rank) + inner * H
                small += (rank + layer.head_dim) * (H + 1) + layer.num_heads
                small += layer.open_dim * H + layer.open_dim // 2 * layer.rate
                small += (layer.head_dim + layer.index_dim) * (layer.rate > 0)
                small += layer.index_heads * (layer.index_dim * rank + H)
                continue
            if self.latent:
                rank, made = self.latent.query_rank, layer.head_dim - layer.rope_dim + layer.value_dim
                queries += layer.num_heads * layer.head_dim * (rank or H)
                queries += layer.num_heads * (made * layer.latent_dim + layer.value_dim * H)
                keys_values += (layer.latent_dim + layer.rope_dim) * H
                small += rank * H + rank + layer.latent_dim
                if isinstance(layer, SparseLatentSpec) and not layer.shares_choice:
                    heads, dim = layer.index_heads, layer.index_dim
                    small += heads * dim * rank + dim * (H + 2) + heads * H
                    wide += heads * H
                continue
            q, k = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
            queries += (
                q * (H * (1 + self.output_gate) + self.qkv_bias) + layer.num_heads * layer.value_dim * H
            )
            keys_values += (k + layer.num_kv_heads * layer.value_dim) * (H + self.qkv_bias)
            norms = {QKNorm.HEAD: 2 * layer.head_dim, QKNorm.WHOLE: q + k}.get(self.qk_norm, 0)
            small += norms
            wide += norms * self.norms_around_one
            small += layer.num_heads if layer.sinks else 0
        wide += H * (1 + 2 * L) * self.norms_around_one
        hashed = len(self.hash_layers)
        exact = hashed * shape.vocab_size * self.moe.top_k  # ids of experts, in four bytes
        if self.streams:
            S = self.streams.count
            exact += 2 * L * (S * (S + 2) * (S * H + 1) + 3) + S * (S * H + 1) + 1
        small += exact - hashed * self.moe.num_experts * self.correction_bias
        wide += exact - hashed * self.moe.num_experts * self.correction_bias
        biases = self.router_bias + self.correction_bias
        draft = (2 * H + 3) * H if self.drafts else 0  # a projection and norms
        router = self.moe.num_experts * (H + biases) + (H if shared and shared.gated else 0)
        return DenseParameters(
            vocabulary=shape.vocab_size * H * (1 if self.tied_embeddings else 2),
            queries=queries,
            keys_values=keys_values,
            mlps=(L - num_moe) * 3 * self.dense_intermediate_size * H,
            shared_experts=num_moe * 3 * shared.intermediate_size * H if shared else 0,
            replicated=H + L * 2 * H + small + num_moe * router + L * H * self.out_bias + draft,
            in_float32=wide
            + num_moe * self.moe.num_experts * (H * self.router_float32 + self.correction_bias),
        )
