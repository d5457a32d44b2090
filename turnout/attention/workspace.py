"""The most that attention allocates in a step, and the sizes of blocks that keep it small. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from turnout.attention.kinds import LATENT_KINDS, AttentionSpec, CacheGroup, CompressedSpec, SparseLatentSpec

LATENT_SPAN = 1024  # tokens whose keys and values latent attention expands at a time
LATENT_CONTEXTS = 3  # times a step's tokens: contexts whose keys and values a kernel may have made at once
SPARSE_ROWS = 16  # tokens that sparse latent attention computes at a time
COMPRESSED_ROWS = 32  # the most tokens that compressed attention computes at a time
COMPRESSED_SCORES = 10**8  # about the most scores of these, as many as 32 tokens of 64 heads have at 195k
COMPRESSED_VALUES = 10**8  # about the most that it gathers of the contexts of single tokens at a time
INDEX_SPAN = 4096  # tokens of a context that it scores at a time


def workspace_bytes(groups: Sequence[CacheGroup], tokens: int, itemsize: int, longest: int = 0) -> int:
    """The most that attention allocates for a chunk of so many tokens, next to queries and results.

    Only latent attention does: keys and values of a span, made and then padded, and in float32 what the spans
    give; or keys and values of LATENT_CONTEXTS times the tokens. longest: of contexts, in tokens, whose
    scores sparse latent attention ranks.
    """
    most = max((_compressed_bytes(g.spec, itemsize, longest) for g in groups), default=0)
    for spec in (group.spec for group in groups if group.spec.kind in LATENT_KINDS):
        expanded = LATENT_SPAN * (3 * spec.head_dim + 2 * spec.value_dim) * itemsize
        joined = tokens * (3 * spec.value_dim * 4 + spec.head_dim * itemsize)
        made = spec.num_heads * (spec.head_dim - spec.rope_dim + spec.value_dim)
        at_once = LATENT_CONTEXTS * tokens * (made + spec.latent_dim + spec.rope_dim) * itemsize
        most = max(most, spec.num_heads * (expanded + joined), at_once)
        if isinstance(spec, SparseLatentSpec):
            most = max(most, _sparse_bytes(spec, tokens, itemsize, longest))
    return most


def compressed_rows(spec: CompressedSpec, entries: int) -> int:
    """Tokens that are computed at a time where a context has so many entries."""
    heads = max(spec.num_heads, spec.index_heads)
    return max(1, min(COMPRESSED_ROWS, COMPRESSED_SCORES // (heads * _compressed_seen(spec, entries))))


def compressed_contexts(spec: CompressedSpec, entries: int) -> int:
    """Single tokens that are computed at a time, each with a context of so many entries."""
    each = _compressed_seen(spec, entries) * (spec.head_dim + spec.index_dim)
    return max(1, min(COMPRESSED_ROWS, COMPRESSED_VALUES // each))


def _compressed_seen(spec: CompressedSpec, entries: int) -> int:
    return spec.recent + COMPRESSED_ROWS + entries


def _compressed_bytes(spec: AttentionSpec, itemsize: int, longest: int) -> int:
    """The entries of a context, and of some of its tokens the scores of these and of the last tokens, thrice;
    or the same of several contexts, each of a single token."""
    if not isinstance(spec, CompressedSpec):
        return 0
    entries = spec.entries(longest)
    seen = _compressed_seen(spec, entries)
    gathered = seen * (spec.head_dim + spec.index_dim) * 2 * itemsize
    scored = max(spec.num_heads, spec.index_heads) * seen * 3 * 4
    return max(
        compressed_rows(spec, entries) * scored + gathered,
        compressed_contexts(spec, entries) * (scored + gathered),
    )


def _sparse_bytes(spec: SparseLatentSpec, tokens: int, itemsize: int, longest: int) -> int:
    """The choices of a step, and of some of its tokens the products and scores of index keys, their ranking,
    and the chosen vectors with their scores."""
    scored = INDEX_SPAN * (2 * spec.index_heads * 4 + spec.index_dim * (4 + itemsize))
    ranked = longest * (3 * 8 + 3 * 4)
    read = (spec.latent_dim + spec.rope_dim) * 2 * itemsize + spec.num_heads * 3 * 4
    absorbed = tokens * spec.num_heads * (2 * spec.latent_dim + spec.rope_dim) * itemsize
    return (
        tokens * spec.index_topk * 4
        + absorbed
        + SPARSE_ROWS * max(scored + ranked, spec.index_topk * (read + 8))
    )
