"""The all-to-all by stores into peers' memory (moe/exchange/one_sided.py), as its rows are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from turnout.moe.backends import DISPATCHER_CAPABILITIES
from turnout.moe.batch import TokensBatch
from turnout.moe.dispatch import DispatchSetup
from turnout.moe.exchange.one_sided import OneSided, Sent


class NvlinkDispatch:
    capability = DISPATCHER_CAPABILITIES["nvlink"]

    def __init__(self, setup: DispatchSetup) -> None:
        self.exchange = OneSided(setup)

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch, Sent]:
        return self.exchange.send(x_TH, topk_ids_TK, topk_weights_TK, tokens)

    def combine(self, out: Tensor, state: Sent) -> Tensor:
        return self.exchange.bring_back(out, state)
