"""An all-to-all through torch.distributed: any backend, any number of hosts.

Each rank's runner sees the tokens that chose one of its experts, from all ranks, or everyone's where that
costs less. How they are sent and summed: all_gather.py, all_to_all_v.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from turnout.moe.backends.collective.all_to_all import make_exchange
from turnout.moe.backends.collective.declaration import TOKENS
from turnout.moe.batch import TokensBatch
from turnout.moe.interface import DispatchSetup


class CollectiveDispatch:
    capability = TOKENS

    def __init__(self, setup: DispatchSetup) -> None:
        self._exchange = make_exchange(setup)

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch, Any]:
        rows_NW, receipt = self._exchange.send(x_TH, topk_ids_TK, topk_weights_TK, tokens)
        return self._exchange.wire.unpack(rows_NW), receipt

    def combine(self, out: Tensor, state: Any) -> Tensor:
        return self._exchange.bring_back(out, state)
