"""The all-to-all where almost every rank needs almost every token: everyone's tokens to all ranks.

A token's k experts lie on most of a few ranks: top-8 needs 90 % of four. Leaving out the rows that no rank
asked for would save the rest, and cost a wait of the host for their counts. Here sizes follow from what
each rank brings, which all of them know.

Results come back as one row per token and rank, zeros from a rank that held none of its experts, and are
summed in the order of ranks, in float32: the same bits every time.

Legend: T tokens of this rank's share, k top-k, H hidden, W words of a row, R ranks, A everyone's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnout.moe.backends.collective.results import Results
from turnout.moe.interface import DispatchSetup
from turnout.moe.wire_format import Wire
from turnout.packages import runs_triton
from turnout.parallel.groups import own_share, shares


@dataclass(frozen=True)
class Sizes:
    """brought: tokens that each rank brings. shares: those of each rank that shares this one's tokens."""

    brought: Sequence[int]
    shares: Sequence[int]


class AllGatherExchange:
    """An `exchange.Exchange` that sends everything to everyone."""

    def __init__(self, setup: DispatchSetup) -> None:
        self.wire, self._results = Wire(setup), Results(setup)
        self._groups = setup.groups
        self._dtype = setup.dtype
        self._fused = runs_triton(setup.device)

    def send(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[Tensor, Sizes]:
        """Everyone's tokens, packed rows [A, W], and the sizes by which their results return."""
        ranks, world = self._groups.attention_tp, self._groups.world
        brought = [count for own in tokens for count in shares(own, ranks.size)]
        share, mine = own_share(len(x_TH), ranks)
        rows_TW = self.wire.pack(x_TH[mine], topk_ids_TK[mine], topk_weights_TK[mine])
        return world.all_gather(rows_TW, brought), Sizes(brought, share)

    def bring_back(self, out_AH: Tensor, sizes: Sizes) -> Tensor:
        world = self._groups.world
        own = sizes.brought[world.rank]
        rows_S = world.all_to_all(self._results.encode(out_AH), sizes.brought, [own] * world.size)
        own_TH = self._sum(self._results.decode(rows_S).view(world.size, own, out_AH.shape[1]))
        return self._groups.attention_tp.all_gather(own_TH, sizes.shares)

    def _sum(self, parts_RTH: Tensor) -> Tensor:
        if self._fused:
            from turnout.kernels.common.pack import sum_parts

            return sum_parts(parts_RTH)
        return parts_RTH.sum(0, dtype=torch.float32).to(self._dtype)
