"""What a layer declares of its attention, and which layers share a cache. Torch-free.

| kind           | a token at position t sees            | keeps of each token | frees                  |
|----------------|---------------------------------------|---------------------|------------------------|
| full           | positions 0 to t                      | keys and values     | nothing before its end |
| sliding_window | positions max(0, t - window + 1) to t | keys and values     | pages below the window |
| recurrent      | a state made of positions 0 to t      | nothing             | nothing before its end |
| latent         | positions 0 to t                      | latent_dim+rope_dim | nothing before its end |
| sparse_latent  | index_topk of positions 0 to t        | the same, index_dim | nothing before its end |
| compressed     | the last `recent`, and entries        | of `rate`: an entry | nothing before its end |

Latent attention (MLA) keeps one vector for all heads of a token, from which their keys and values are made,
and next to it the rotated part of the keys, which the heads share. It is whole on each rank.

Sparse latent attention (DSA) also keeps an index key of each token, by which a token chooses the few that it
attends to (indexing.py). Layers that share the choice of the last one before them that made one keep none.

Compressed attention (DeepSeek-V4) sees the last tokens themselves, and each complete window of `rate` tokens
as one entry that is made of them; with an index, only the best `index_topk` of the entries. What is kept of
the last tokens, and of the window that is not complete yet, is a state of the request, of fixed size.

With sinks each query head has one learned logit that takes part in the denominator of the softmax only. It is
not multiplied by the scale.

Recurrent layers (Gated DeltaNet) keep a state of fixed size for each request, and nothing for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from turnout.vocabulary import AttentionKind

LATENT_KINDS = frozenset({AttentionKind.LATENT, AttentionKind.SPARSE_LATENT})


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer, with the heads of the whole model or of one rank (`split`).

    head_dim: of queries and keys; value_dim: of values. scale multiplies the products of queries and keys.
    rope: the name of one of the model's rotary embeddings. window: in tokens, the token itself included; 0
    unless the kind is sliding_window. latent_dim, rope_dim: of the kept vector and of the rotated end of a
    key, 0 unless the kind is one of LATENT_KINDS, whose num_kv_heads is 1.
    """

    kind: AttentionKind = AttentionKind.FULL
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int = 0
    sinks: bool = False
    latent_dim: int = 0
    rope_dim: int = 0
    rope: str = "default"

    def __post_init__(self) -> None:
        if (self.kind == AttentionKind.SLIDING_WINDOW) != (self.window > 0):
            raise ValueError(f"{self.kind} attention with a window of {self.window} tokens")
        if (self.kind in LATENT_KINDS) != (self.latent_dim > 0):
            raise ValueError(f"{self.kind} attention with a latent vector of {self.latent_dim}")

    @classmethod
    def full(cls, *, num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionSpec:
        """Full attention with keys and values of one size and a scale of 1 / sqrt(head_dim)."""
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            scale=head_dim**-0.5,
        )

    @classmethod
    def latent(
        cls,
        *,
        num_heads: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        latent_dim: int,
        scaling: float = 1.0,
    ) -> AttentionSpec:
        """Keys are nope_dim made of the latent vector, then rope_dim. scaling: of 1 / sqrt(head_dim)."""
        return cls(
            kind=AttentionKind.LATENT,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=nope_dim + rope_dim,
            value_dim=value_dim,
            scale=(nope_dim + rope_dim) ** -0.5 * scaling,
            latent_dim=latent_dim,
            rope_dim=rope_dim,
        )

    def sliding(self, window: int) -> AttentionSpec:
        """The same with a sliding window of so many tokens."""
        return replace(self, kind=AttentionKind.SLIDING_WINDOW, window=window)

    def splits(self, ranks: int) -> bool:
        """Whether heads can be divided evenly over ranks, and KV heads divided or repeated evenly."""
        kv_heads = self.num_kv_heads
        return self.num_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    def split(self, ranks: int) -> AttentionSpec:
        """The heads of each of so many ranks. Raises ValueError where they cannot be divided evenly."""
        if not self.splits(ranks):
            raise ValueError(f"{self.heads()}, cannot be split evenly over {ranks} ranks")
        return replace(
            self, num_heads=self.num_heads // ranks, num_kv_heads=max(1, self.num_kv_heads // ranks)
        )

    def heads(self) -> str:
        """How many there are, in words."""
        return f"{self.num_heads} heads, {self.num_kv_heads} of KV"

    def first_seen(self, position: int) -> int:
        """The first position that a token at `position` sees."""
        return max(0, position - self.window + 1) if self.window else 0

    def handed_bytes(self, itemsize: int, *, stored: bool = False) -> tuple[int, ...]:
        """What the layer hands to attention of a token, of each tensor. stored: but keys and values, which
        its own kernels have stored."""
        queries, kv = self.num_heads * self.head_dim * itemsize, self.num_kv_heads * itemsize
        if self.kind in LATENT_KINDS:
            return queries, (self.latent_dim + self.rope_dim) * itemsize
        return (queries,) if stored else (queries, kv * self.head_dim, kv * self.value_dim)

    @property
    def output_size(self) -> int:
        """What attention returns of a token."""
        return self.num_heads * self.value_dim

    def token_bytes(self, itemsize: int) -> int:
        """What is kept of one token in one layer."""
        if self.kind in LATENT_KINDS:
            return (self.latent_dim + self.rope_dim) * itemsize
        return self.num_kv_heads * (self.head_dim + self.value_dim) * itemsize


@dataclass(frozen=True, kw_only=True)
class SparseLatentSpec(AttentionSpec):
    """A layer of sparse latent attention, whose indexer is whole on each rank.

    index_heads, index_dim: number and size of the heads of index queries; a token has one index key.
    index_topk: how many tokens a token attends to. shares_choice: the layer has no indexer, and attends to
    what the last layer before it that has one chose. index_fp8: index keys are rounded to FP8 and kept so.
    """

    kind: AttentionKind = AttentionKind.SPARSE_LATENT
    index_heads: int
    index_dim: int
    index_topk: int
    shares_choice: bool = False
    index_fp8: bool = False

    def handed_bytes(self, itemsize: int, *, stored: bool = False) -> tuple[int, ...]:
        found, heads = super().handed_bytes(itemsize, stored=stored), self.index_heads
        if self.shares_choice:
            return found
        return *found, heads * self.index_dim * itemsize, self.index_dim * itemsize, heads * 4

    def token_bytes(self, itemsize: int) -> int:
        return super().token_bytes(itemsize) + (0 if self.shares_choice else self.index_bytes(itemsize))

    def index_bytes(self, itemsize: int) -> int:
        """Of an index key; in FP8 with its float32 scale."""
        return self.index_dim + 4 if self.index_fp8 else self.index_dim * itemsize


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(AttentionSpec):
    """A layer of compressed attention. One vector of head_dim, its end of rope_dim rotated, is key and value
    of all heads, and whole on each rank.

    recent: how many of the last tokens a token sees, itself included. rate: tokens that make one entry; 0:
    there are none. overlap: an entry is also made of the window before its own. index_heads, index_dim,
    index_topk: of the index that chooses entries; index_topk 0: all are seen. output_groups: into which heads
    are divided where they are projected.
    """

    kind: AttentionKind = AttentionKind.COMPRESSED
    recent: int
    rate: int = 0
    overlap: bool = False
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    output_groups: int

    def splits(self, ranks: int) -> bool:
        """Whether output groups, with their heads, can be divided evenly over ranks."""
        return self.output_groups % ranks == 0

    def split(self, ranks: int) -> CompressedSpec:
        if not self.splits(ranks):
            raise ValueError(f"{self.heads()}, cannot be split evenly over {ranks} ranks")
        heads, groups = self.num_heads // ranks, self.output_groups // ranks
        return replace(self, num_heads=heads, output_groups=groups)

    def heads(self) -> str:
        return f"{self.num_heads} heads in {self.output_groups} groups of outputs"

    def handed_bytes(self, itemsize: int, *, stored: bool = False) -> tuple[int, ...]:
        queries, heads = self.num_heads * self.head_dim * itemsize, self.index_heads
        found = queries, self.head_dim * itemsize, self.open_dim * itemsize
        return (*found, heads * self.index_dim * itemsize, heads * 4)

    @property
    def series(self) -> int:
        """Vectors that a token contributes to entries: one for its own window, one for the next."""
        return 1 + self.overlap

    @property
    def remembered(self) -> int:
        """Tokens of which an entry may be made."""
        return self.series * self.rate

    @property
    def open_dim(self) -> int:
        """Kept of a token until its entries are made: content and gate, of the index's entries too."""
        return 2 * self.series * (self.head_dim + self.index_dim) if self.rate else 0

    def token_bytes(self, itemsize: int) -> int:
        """On average, where pages hold whole windows."""
        return (self.head_dim + self.index_dim) * itemsize // self.rate if self.rate else 0

    def entries_per_page(self, page_size: int) -> int:
        """A window longer than a page has its entry in the page of its last token."""
        return max(1, page_size // self.rate) if self.rate else 0

    def entries(self, tokens: int) -> int:
        """Of a context of so many tokens."""
        return tokens // self.rate if self.rate else 0

    def splits_windows(self, page_size: int) -> bool:
        """Whether a page would begin or end within a window without holding a part of one only."""
        return self.rate > 0 and page_size % self.rate > 0 and self.rate % page_size > 0

    def ring_sizes(self, drafts: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """What is kept of one request in one layer, as [tokens, channels]: of its last tokens, and of those
        of windows that are not complete. drafts: the most that a step verifies, and may reject."""
        return (self.recent + drafts, self.head_dim), (self.remembered + drafts, self.open_dim)

    def request_bytes(self, itemsize: int, drafts: int) -> int:
        """Of one request in one layer."""
        return sum(tokens * channels for tokens, channels in self.ring_sizes(drafts)) * itemsize


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec(AttentionSpec):
    """A layer of Gated DeltaNet (delta_rule.py), with the heads of the whole model or of one rank.

    num_heads: of values; num_kv_heads: of queries and keys, each shared by num_heads / num_kv_heads value
    heads that follow one another. conv_width: tokens that the convolution before it sees, the token included.
    """

    kind: AttentionKind = AttentionKind.RECURRENT
    conv_width: int

    def splits(self, ranks: int) -> bool:
        """Whether key heads, with their value heads, can be divided evenly over ranks."""
        return self.num_kv_heads % ranks == 0

    def heads(self) -> str:
        return f"{self.num_kv_heads} key heads and {self.num_heads} value heads of Gated DeltaNet"

    def token_bytes(self, itemsize: int) -> int:
        return 0

    @property
    def channels(self) -> int:
        """What the convolution goes over: queries, keys and values of all heads."""
        return 2 * self.num_kv_heads * self.head_dim + self.num_heads * self.value_dim

    def handed_bytes(self, itemsize: int, *, stored: bool = False) -> tuple[int, ...]:
        return (self.mixed * itemsize,)

    @property
    def mixed(self) -> int:
        """What the layer computes of each token before its state: queries, keys, values, the gate of the
        output, and beta and the decay's logit of each value head."""
        return self.channels + self.num_heads * (self.value_dim + 2)

    def state_bytes(self, itemsize: int) -> int:
        """Of one request in one layer: the convolution's window in the compute type, a float32 state."""
        window = self.channels * (self.conv_width - 1) * itemsize
        return window + self.num_heads * self.head_dim * self.value_dim * 4


@dataclass(frozen=True, kw_only=True)
class StateGroup:
    """Recurrent layers of one shape, whose states a request has in one slot. layers: as in `CacheGroup`."""

    layers: tuple[int, ...]
    spec: DeltaNetSpec

    def state_bytes(self, itemsize: int) -> int:
        """Of one request in all layers of the group."""
        return len(self.layers) * self.spec.state_bytes(itemsize)


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers of one kind and shape, which share pages, a page table and an eviction rule.

    layers: their indices in the model, ascending. spec: of each of them, but for the rope and for whether it
    shares a choice. sharing: those that do.
    """

    layers: tuple[int, ...]
    spec: AttentionSpec
    sharing: tuple[int, ...]

    def token_bytes(self, itemsize: int) -> int:
        """Of one token in all layers of the group."""
        keys = self.spec.index_bytes(itemsize) if isinstance(self.spec, SparseLatentSpec) else 0
        return len(self.layers) * self.spec.token_bytes(itemsize) - len(self.sharing) * keys

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        """Of a page of so many tokens in all layers of the group."""
        if isinstance(self.spec, CompressedSpec):
            entry = (self.spec.head_dim + self.spec.index_dim) * itemsize
            return len(self.layers) * self.spec.entries_per_page(page_size) * entry
        return page_size * self.token_bytes(itemsize)

    def request_bytes(self, itemsize: int, drafts: int = 0) -> int:
        """Of one request in all layers of the group, next to its pages, where a step verifies so many."""
        found = self.spec.request_bytes(itemsize, drafts) if isinstance(self.spec, CompressedSpec) else 0
        return len(self.layers) * found


def cache_groups(layers: Sequence[AttentionSpec]) -> tuple[CacheGroup, ...]:
    """The groups of a model's layers that keep something of each token: first those that keep whole contexts,
    then by their first layer."""
    alike = {spec: _alike(spec) for spec in set(layers)}
    members: dict[AttentionSpec, list[int]] = {}
    for i, spec in enumerate(layers):
        if spec.kind != AttentionKind.RECURRENT:
            members.setdefault(alike[spec], []).append(i)
    groups = [
        CacheGroup(
            layers=tuple(found),
            spec=layers[found[0]],
            sharing=tuple(i for i in found if _shares_choice(layers[i])),
        )
        for found in members.values()
    ]
    return tuple(sorted(groups, key=lambda group: group.spec.window > 0))


def _alike(spec: AttentionSpec) -> AttentionSpec:
    """What layers of a group have in common."""
    if isinstance(spec, SparseLatentSpec):
        return replace(spec, rope="", shares_choice=False)
    return replace(spec, rope="")


def _shares_choice(spec: AttentionSpec) -> bool:
    return isinstance(spec, SparseLatentSpec) and spec.shares_choice


def most_handed_bytes(layers: Sequence[AttentionSpec], itemsize: int, *, stored: bool) -> tuple[int, ...]:
    """The most that some layer hands to attention of a token, of each tensor; see `handed_bytes`."""
    of_layers = (layer.handed_bytes(itemsize, stored=stored) for layer in set(layers))
    return tuple(max(sizes) for sizes in zip_longest(*of_layers, fillvalue=0))


def keeps_states(layers: Sequence[AttentionSpec]) -> bool:
    """Whether some layer has a state of each request, of fixed size."""
    return any(spec.kind in (AttentionKind.RECURRENT, AttentionKind.COMPRESSED) for spec in layers)


def state_groups(layers: Sequence[AttentionSpec]) -> tuple[StateGroup, ...]:
    """The groups of a model's layers that keep a state of each request, by their first layer."""
    members: dict[DeltaNetSpec, list[int]] = {}
    for i, spec in enumerate(layers):
        if isinstance(spec, DeltaNetSpec):
            members.setdefault(spec, []).append(i)
    return tuple(StateGroup(layers=tuple(found), spec=spec) for spec, found in members.items())
