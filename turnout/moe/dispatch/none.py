"""Every rank sees the tokens of all ranks and computes those of its experts.

Ranks that hold the same tokens (one data-parallel group) exchange nothing: each has a partial sum, which
the layer reduces, as the plan says. Data-parallel groups gather their tokens before the experts and sum and
scatter the results after them. A decode step is padded to the largest rank, so that its sizes do not depend
on who brings what; prefill, where that would multiply the work, is exact.

Legend: T tokens of this rank, A of all ranks with padding, H hidden, k top-k, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnout.moe.backends import DISPATCHER_CAPABILITIES
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.parallel.groups import Groups


class NoDispatch:
    capability = DISPATCHER_CAPABILITIES["none"]

    def __init__(
        self,
        spec: MoESpec,
        plan: MoEPlan,
        phase: str,
        groups: Groups,
        device: torch.device,
        input_scale: Tensor | None = None,
    ) -> None:
        self._top_k, self._padded, self._groups = spec.top_k, phase == "decode", groups

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch, tuple[Sequence[int], Sequence[int]]]:
        ranks = self._groups.data_parallel
        counts = [max(tokens)] * ranks.size if self._padded else tokens
        if ranks.size > 1:
            x_TH, topk_ids_TK, topk_weights_TK = (
                ranks.all_gather(_pad(t, counts[ranks.rank], fill), counts)
                for t, fill in ((x_TH, 0), (topk_ids_TK, -1), (topk_weights_TK, 0))
            )
        hidden = Hidden(data=x_TH)
        batch = TokensBatch(hidden=hidden, topk_ids=topk_ids_TK, topk_weights=topk_weights_TK)
        return batch, (counts, tokens)

    def combine(self, out_AH: Tensor, state: tuple[Sequence[int], Sequence[int]]) -> Tensor:
        counts, tokens = state
        ranks = self._groups.data_parallel
        if ranks.size == 1:
            return out_AH
        out_TH = ranks.reduce_scatter(out_AH, counts)[: tokens[ranks.rank]]
        return self._groups.attention_tp.all_reduce(out_TH)


def _pad(x: Tensor, rows: int, fill: int) -> Tensor:
    return x if len(x) == rows else torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), fill)])
