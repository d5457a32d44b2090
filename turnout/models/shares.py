"""What one rank holds of the matrices that ranks split among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from turnout.models.interface import ModelShape
from turnout.parallel.groups import Group, shares


@dataclass(frozen=True)
class Share:
    """Rows or columns `start .. start + size` of `total`."""

    total: int
    start: int
    size: int


def whole(total: int) -> Share:
    return Share(total, 0, total)


def split(total: int, group: Group) -> Share:
    """This rank's share of `total` among the ranks of `group`, as even as can be."""
    sizes = shares(total, group.size)
    return Share(total, sum(sizes[: group.rank]), sizes[group.rank])


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The attention heads of one rank of `group`, as rows or columns of its projections.

    Query heads are split. So are KV heads, unless ranks outnumber them: then neighbours, whose queries
    belong to the same KV head, hold it each. `shape`: the model's, with this rank's numbers of heads.
    """

    shape: ModelShape
    queries: Share
    keys: Share

    @classmethod
    def of(cls, shape: ModelShape, group: Group) -> Heads:
        """Raises ValueError where the heads cannot be split evenly."""
        num_q, num_kv, ranks = shape.num_heads, shape.num_kv_heads, group.size
        if num_q % ranks or (num_kv % ranks and ranks % num_kv):
            raise ValueError(f"{num_q} heads, {num_kv} of KV, cannot be split evenly over {ranks} ranks")
        local = replace(shape, num_heads=num_q // ranks, num_kv_heads=max(1, num_kv // ranks))
        D = shape.head_dim
        return cls(
            shape=local,
            queries=Share(num_q * D, group.rank * local.num_heads * D, local.num_heads * D),
            keys=Share(num_kv * D, group.rank * num_kv // ranks * D, local.num_kv_heads * D),
        )
