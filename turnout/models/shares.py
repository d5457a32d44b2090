"""What one rank holds of the matrices that ranks split among them."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.attention.kinds import AttentionSpec
from turnout.parallel.groups import Group, own_share


@dataclass(frozen=True)
class Share:
    """Rows or columns `start .. start + size` of `total`."""

    total: int
    start: int
    size: int

    def times(self, each: int) -> Share:
        """As many rows or columns of each of these."""
        return Share(self.total * each, self.start * each, self.size * each)


def whole(total: int) -> Share:
    return Share(total, 0, total)


def split(total: int, group: Group) -> Share:
    """This rank's share of `total` among the ranks of `group`, as even as can be."""
    _, mine = own_share(total, group)
    return Share(total, mine.start, mine.stop - mine.start)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The attention heads of one rank of `group` in a layer, as rows or columns of its projections.

    Query heads are split. So are KV heads, unless ranks outnumber them: then neighbours, whose queries
    belong to the same KV head, hold it each. spec: the layer's, with this rank's numbers of heads. heads: its
    query heads.
    """

    spec: AttentionSpec
    heads: Share
    queries: Share
    keys: Share
    values: Share
    outputs: Share

    @classmethod
    def of(cls, spec: AttentionSpec, group: Group) -> Heads:
        """Raises ValueError where the heads cannot be split evenly."""
        local = spec.split(group.size)
        heads = Share(spec.num_heads, group.rank * local.num_heads, local.num_heads)
        first_kv = group.rank * spec.num_kv_heads // group.size
        kv_heads = Share(spec.num_kv_heads, first_kv, local.num_kv_heads)
        return cls(
            spec=local,
            heads=heads,
            queries=heads.times(spec.head_dim),
            keys=kv_heads.times(spec.head_dim),
            values=kv_heads.times(spec.value_dim),
            outputs=heads.times(spec.value_dim),
        )
