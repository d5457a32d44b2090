"""Every rank sees the tokens of all ranks and computes those of its experts.

Ranks that hold the same tokens (one data-parallel group) exchange nothing: each has a partial sum, which
the layer reduces, as the plan says. Data-parallel groups gather their tokens before the experts and sum and
scatter the results after them. A decode step is padded to the largest rank, so that its sizes do not depend
on who brings what; prefill, where that would multiply the work, is exact.

Legend: T tokens of this rank, A of all ranks with padding, H hidden, k top-k, W words of a packed row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from turnout.moe.backends.local.declaration import DISPATCHER
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.interface import DispatchSetup
from turnout.moe.wire_format import Wire
from turnout.vocabulary import Phase


class NoDispatch:
    """A `Dispatcher` (moe/interface.py) without an all-to-all: each rank sees the tokens of all."""

    capability = DISPATCHER

    def __init__(self, setup: DispatchSetup) -> None:
        groups = setup.groups
        self._padded, self._groups = setup.phase == Phase.DECODE, groups
        gathers = groups.data_parallel.size > 1
        self._wire = Wire(setup) if gathers else None

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch, tuple[Sequence[int], Sequence[int]]]:
        if self._wire is None:
            hidden = Hidden(data=x_TH)
            batch = TokensBatch(hidden=hidden, topk_ids=topk_ids_TK, topk_weights=topk_weights_TK)
            return batch, (tokens, tokens)
        ranks = self._groups.data_parallel
        counts = [max(tokens)] * ranks.size if self._padded else tokens
        rows_TW = self._wire.pack(x_TH, topk_ids_TK, topk_weights_TK, counts[ranks.rank])
        return self._wire.unpack(ranks.all_gather(rows_TW, counts)), (counts, tokens)

    def combine(self, out_AH: Tensor, state: tuple[Sequence[int], Sequence[int]]) -> Tensor:
        counts, tokens = state
        if self._wire is None:
            return out_AH
        ranks = self._groups.data_parallel
        out_TH = ranks.reduce_scatter(out_AH, counts)[: tokens[ranks.rank]]
        return self._groups.attention_tp.all_reduce(out_TH)
