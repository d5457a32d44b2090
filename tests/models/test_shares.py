"""Which heads and rows a rank holds: all of them once, and each query's keys with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from turnout.attention.kinds import AttentionSpec
from turnout.models.shares import Heads, Share, split
from turnout.parallel.groups import Group

LAYER = AttentionSpec.full(num_heads=8, num_kv_heads=2, head_dim=16).sliding(4)


def group(ranks: int, rank: int) -> Group:
    return Group(range(ranks), rank)


def indices(share: Share) -> list[int]:
    return list(range(share.start, share.start + share.size))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("total", [0, 1, 5, 12, 387])
def test_shares_are_all_there_is_once_and_even(total: int, ranks: int) -> None:
    parts = [split(total, group(ranks, rank)) for rank in range(ranks)]
    assert [i for part in parts for i in indices(part)] == list(range(total))
    assert max(p.size for p in parts) - min(p.size for p in parts) <= 1
    assert {p.total for p in parts} == {total}


@pytest.mark.parametrize(
    ("queries", "keys", "ranks"),
    [(8, 8, 4), (8, 4, 4), (8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 1, 8), (32, 4, 8), (12, 6, 3), (12, 3, 6)],
)
def test_each_query_head_finds_its_keys(queries: int, keys: int, ranks: int) -> None:
    """Head q of the model attends to KV head q // (queries / keys), on its rank as in the whole model."""
    layer, D = replace(LAYER, num_heads=queries, num_kv_heads=keys), LAYER.head_dim
    seen = []
    for rank in range(ranks):
        heads = Heads.of(layer, group(ranks, rank))
        local = heads.spec
        assert (heads.queries.size, heads.keys.size) == (local.num_heads * D, local.num_kv_heads * D)
        for i in range(local.num_heads):
            q = heads.queries.start // D + i
            kv = heads.keys.start // D + i // (local.num_heads // local.num_kv_heads)
            assert kv == q // (queries // keys)
            seen.append(q)
    assert seen == list(range(queries))


@pytest.mark.parametrize(("queries", "keys", "ranks"), [(6, 2, 4), (12, 6, 4), (8, 2, 3)])
def test_heads_that_cannot_be_split_evenly(queries: int, keys: int, ranks: int) -> None:
    layer = replace(LAYER, num_heads=queries, num_kv_heads=keys)
    with pytest.raises(ValueError, match=f"{queries} heads, {keys} of KV, .* {ranks} ranks"):
        Heads.of(layer, group(ranks, 0))


def test_the_rest_of_what_a_layer_declares_is_the_models() -> None:
    heads = Heads.of(replace(LAYER, value_dim=8, sinks=True), group(4, 3))
    assert heads.spec == replace(LAYER, num_heads=2, num_kv_heads=1, value_dim=8, sinks=True)
    assert heads.heads == Share(8, 6, 2)
    assert (heads.values, heads.outputs) == (Share(2 * 8, 8, 8), Share(8 * 8, 6 * 8, 2 * 8))
