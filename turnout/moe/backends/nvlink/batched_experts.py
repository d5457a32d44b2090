"""The all-to-all by stores into peers' memory, in the layout "batched_experts", which masked runners take.

Rows arrive as in moe/backends/nvlink/all_to_all.py. Each expert has room for all of them, since all may have
chosen it; how many are in use stays on the device, so decode steps may be graphs. Routing
weights are applied here, after the experts, and a token's results are summed before its one row goes back.

Legend: N rows, k top-k, E experts held here, C = N rows per expert, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from turnout.moe.backends.nvlink.all_to_all import NvlinkAllToAll, Sent
from turnout.moe.backends.nvlink.declaration import BATCHED_EXPERTS
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.interface import DispatchSetup


@dataclass(frozen=True)
class Received:
    """Rows as they came, and where they are in the batch [E, C]: places int64 [N, k]."""

    rows: TokensBatch
    places_NK: Tensor
    sent: Sent


class NvlinkExpertsDispatch:
    """A `Dispatcher` (moe/interface.py): rows over NVLink, laid out [E, C, H] for masked runners."""

    capability = BATCHED_EXPERTS

    def __init__(self, setup: DispatchSetup) -> None:
        self.exchange = NvlinkAllToAll(setup)
        self._first, self._count = setup.plan.first_expert, setup.plan.num_local_experts

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[ExpertsBatch, Received]:
        from turnout.kernels.nvlink.batched_experts import places, spread

        rows, sent = self.exchange.send(x_TH, topk_ids_TK, topk_weights_TK, tokens)
        ids_NK, hidden = rows.topk_ids, rows.hidden
        places_NK, counts_E = places(ids_NK, self._first, self._count)
        scale = hidden.scale
        if scale is not None:
            scale = spread(scale, ids_NK, places_NK, self._count)
        laid_out = replace(hidden, data=spread(hidden.data, ids_NK, places_NK, self._count), scale=scale)
        return ExpertsBatch(hidden=laid_out, counts=counts_E), Received(rows, places_NK, sent)

    def combine(self, out: Tensor, state: Received) -> Tensor:
        from turnout.kernels.nvlink.batched_experts import weigh

        rows = state.rows
        out_NH = weigh(out.contiguous(), rows.topk_ids, state.places_NK, rows.topk_weights)
        return self.exchange.bring_back(out_NH, state.sent)
