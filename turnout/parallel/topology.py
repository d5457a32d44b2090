"""Ranks and groups: one frozen value from the flags, and this rank's place in it.

Attention TP = tp / dp; expert TP = tp / ep. Rank order: expert-TP ranks of one EP slice are neighbours,
and so are the attention-TP ranks of one DP group. Example, tp 8, dp 4, ep 4:

    rank          0 1 2 3 4 5 6 7
    dp rank       0 0 1 1 2 2 3 3
    ep rank       0 0 1 1 2 2 3 3
    expert-TP     0 1 0 1 0 1 0 1
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from turnout.errors import Refusal, standing


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`tp_size` ranks in all. Every size divides `tp_size`; `rank` is this process's.

    A value whose sizes do not divide can be made, so that `refusals` can say everything that is wrong
    with it at once; the other members are meaningful only when there are none.
    """

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    enable_dp_attention: bool = False
    moe_dense_tp_size: int = 0  # 0: as many as attention
    enable_dp_lm_head: bool = False
    nnodes: int = 1
    rank: int = 0

    @classmethod
    def of(cls, config: object, rank: int = 0) -> Topology:
        """`rank`'s place among ranks of the sizes that `config` has under the same names."""
        sizes = {field.name: getattr(config, field.name) for field in fields(cls) if field.name != "rank"}
        sizes["enable_dp_attention"] = bool(sizes["enable_dp_attention"])
        return cls(**sizes, rank=rank)

    @property
    def attention_tp(self) -> int:
        return self.tp_size // self.dp_size

    @property
    def dense_tp(self) -> int:
        """Ranks that divide an MLP of a dense layer."""
        return self.moe_dense_tp_size or self.attention_tp

    @property
    def expert_tp(self) -> int:
        return self.tp_size // self.ep_size

    @property
    def ranks_per_node(self) -> int:
        return self.tp_size // self.nnodes

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def dp_rank(self) -> int:
        return self.rank // self.attention_tp

    @property
    def attention_tp_rank(self) -> int:
        return self.rank % self.attention_tp

    @property
    def ep_rank(self) -> int:
        return self.rank // self.expert_tp

    @property
    def expert_tp_rank(self) -> int:
        return self.rank % self.expert_tp

    def expert_range(self, num_experts: int) -> range:
        """Global ids of the experts this rank holds (a slice of each when expert TP is above 1)."""
        per_rank = num_experts // self.ep_size
        return range(self.ep_rank * per_rank, (self.ep_rank + 1) * per_rank)

    def attention_tp_groups(self) -> list[list[int]]:
        """Ranks that share one DP group's requests, one list per DP rank."""
        size = self.attention_tp
        return [list(range(first, first + size)) for first in range(0, self.tp_size, size)]

    def describe(self) -> dict[str, Any]:
        """Plain values for JSON: the sizes, and this rank's place in each group. Needs sizes that divide."""
        return asdict(self) | {
            "attention_tp": self.attention_tp,
            "expert_tp": self.expert_tp,
            "dp_rank": self.dp_rank,
            "attention_tp_rank": self.attention_tp_rank,
            "ep_rank": self.ep_rank,
            "expert_tp_rank": self.expert_tp_rank,
            "node": self.node,
        }

    def refusals(self) -> list[Refusal]:
        """Everything that is wrong with the sizes, each with the value that would work."""
        sizes = {"--dp-size": self.dp_size, "--ep-size": self.ep_size, "--nnodes": self.nnodes}
        found = [
            self._indivisible(flag, size) for flag, size in sizes.items() if size < 1 or self.tp_size % size
        ]
        attention = (
            (
                self.dp_size > 1 and not self.enable_dp_attention,
                f"--dp-size {self.dp_size}",
                "data-parallel groups share the experts, so their attention must be data-parallel",
                "add --enable-dp-attention, or drop --dp-size",
            ),
            (
                self.enable_dp_lm_head and not self.enable_dp_attention,
                "--enable-dp-lm-head",
                "without data-parallel attention all ranks share requests and divide the head",
                "add --enable-dp-attention with --dp-size, or drop --enable-dp-lm-head",
            ),
        )
        beyond = (
            not 0 <= self.rank < self.tp_size,
            f"rank {self.rank}",
            f"ranks run from 0 to {self.tp_size - 1}",
            f"use --tp-size {self.rank + 1} or more, or start fewer ranks",
        )
        found += standing("topology", attention)
        dense = [] if found else [self._dense_obstacle()]  # divides by sizes that make sense
        return found + standing("topology", [*dense, beyond])

    def _dense_obstacle(self) -> tuple[bool, str, str, str]:
        """A --moe-dense-tp-size by which dense layers cannot be divided, as `standing` takes it."""
        return (
            self.moe_dense_tp_size not in (0, 1, self.attention_tp),
            f"--moe-dense-tp-size {self.moe_dense_tp_size}",
            "dense layers are divided over the ranks that share requests, or whole on each",
            "use --moe-dense-tp-size 1" + (f" or {self.attention_tp}" if self.attention_tp > 1 else ""),
        )

    def _indivisible(self, flag: str, size: int) -> Refusal:
        return Refusal(
            who="topology",
            asked=f"{flag} {size} with --tp-size {self.tp_size}",
            limit="must divide --tp-size, the number of ranks",
            remedy=f"use {flag} {one_of(divisors(self.tp_size))}"
            + (f", or --tp-size {size * max(1, -(-self.tp_size // size))}" if size > 0 else ""),
        )


def divisors(n: int) -> list[int]:
    """Ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def one_of(values: Sequence[int]) -> str:
    """ "2, 4 or 8": the alternatives of a remedy."""
    return ", ".join(map(str, values[:-1])) + (" or " if len(values) > 1 else "") + str(values[-1])


def split_address(address: str) -> tuple[str, int] | None:
    """HOST and PORT of "HOST:PORT" or "[HOST]:PORT" (IPv6); None for anything else."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:/\[\]]+)):(\d{1,5})", address)
    if match is None or not 1 <= int(match[3]) <= 65535:
        return None
    return match[1] or match[2], int(match[3])
