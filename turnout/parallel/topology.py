"""Ranks and groups: one frozen value from the flags, and this rank's place in it.

Attention TP = tp / dp; expert TP = tp / ep. Rank order: expert-TP ranks of one EP slice are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`tp_size` ranks in all. Every size divides `tp_size`; `rank` is this process's."""

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    enable_dp_attention: bool = False
    nnodes: int = 1
    rank: int = 0

    @property
    def attention_tp(self) -> int:
        return self.tp_size // self.dp_size

    @property
    def expert_tp(self) -> int:
        return self.tp_size // self.ep_size

    @property
    def ep_rank(self) -> int:
        return self.rank // self.expert_tp

    @property
    def expert_tp_rank(self) -> int:
        return self.rank % self.expert_tp
