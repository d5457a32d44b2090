"""The all-to-all in the layout "batched_experts", which masked runners take, on any machine.

Tokens are sent as in collective/all_to_all.py. Those received are laid out by expert, with as many rows each
as the busiest expert got; the host waits for that number. Routing weights are applied here, after the
experts, and a token's results are summed before its one row goes back.

Legend: N tokens received, k top-k, P (token, local expert) pairs, E experts held here, C rows per expert,
H hidden, W words of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.moe.backends.collective.all_to_all import make_exchange
from turnout.moe.backends.collective.declaration import BATCHED_EXPERTS
from turnout.moe.batch import ExpertsBatch, Hidden
from turnout.moe.interface import DispatchSetup


@dataclass(frozen=True)
class Pairs:
    """Where each pair's row is, token by token: row_P of E C; weight_P; bags_N1: where tokens begin."""

    row_P: Tensor
    weight_P: Tensor
    bags_N1: Tensor


class CollectiveExpertsDispatch:
    """A `Dispatcher` (moe/interface.py) through torch.distributed: rows laid out [E, C, H] for masked
    runners."""

    capability = BATCHED_EXPERTS

    def __init__(self, setup: DispatchSetup) -> None:
        self._exchange = make_exchange(setup)
        self._first, self._count = setup.plan.first_expert, setup.plan.num_local_experts

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[ExpertsBatch, tuple[Pairs, Any]]:
        rows_NW, receipt = self._exchange.send(x_TH, topk_ids_TK, topk_weights_TK, tokens)
        received = self._exchange.wire.unpack(rows_NW)
        held_NK, expert_NK = self._held(received.topk_ids)
        token_P, slot_P = held_NK.nonzero(as_tuple=True)
        expert_P = expert_NK[token_P, slot_P]
        counts_E = torch.bincount(expert_P, minlength=self._count)
        C = int(counts_E.max())
        # In a stable order by expert, the pairs of one expert keep their order: their place in its rows.
        order_P = expert_P.argsort(stable=True)
        begin_E = counts_E.cumsum(0) - counts_E
        row_P = torch.empty_like(order_P)
        row_P[order_P] = torch.arange(len(order_P), device=order_P.device)
        row_P += (expert_P * C) - begin_E[expert_P]
        pairs = Pairs(row_P, received.topk_weights[token_P, slot_P], F.pad(held_NK.sum(1).cumsum(0), (1, 0)))
        laid_out = rows_NW.new_zeros(self._count * C, rows_NW.shape[1])
        laid_out[row_P] = rows_NW[token_P]
        hidden = self._exchange.wire.unpack(laid_out).hidden
        batch = ExpertsBatch(hidden=_batched(hidden, self._count, C), counts=counts_E.int())
        return batch, (pairs, receipt)

    def combine(self, out: Tensor, state: tuple[Pairs, Any]) -> Tensor:
        pairs, receipt = state
        y_PH = out.flatten(0, 1).index_select(0, pairs.row_P).float()
        out_NH = F.embedding_bag(
            torch.arange(len(y_PH), device=y_PH.device),
            y_PH,
            pairs.bags_N1,
            mode="sum",
            per_sample_weights=pairs.weight_P,
            include_last_offset=True,
        )
        return self._exchange.bring_back(out_NH, receipt)

    def _held(self, topk_ids_NK: Tensor) -> tuple[Tensor, Tensor]:
        """bool [N, k]: whether the expert is one of this rank's; its local index [N, k], if so."""
        local_NK = topk_ids_NK.long() - self._first
        return (local_NK >= 0) & (local_NK < self._count), local_NK


def _batched(hidden: Hidden, E: int, C: int) -> Hidden:
    """Rows [E C, ...] as [E, C, ...]."""
    scale = None if hidden.scale is None else hidden.scale.unflatten(0, (E, C))
    return replace(hidden, data=hidden.data.unflatten(0, (E, C)), scale=scale)
