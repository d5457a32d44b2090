"""Dispatcher "nvlink": the rows of all_to_all.py as they arrive, in the layout "tokens"."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from turnout.moe.backends.nvlink.all_to_all import NvlinkAllToAll, Sent
from turnout.moe.backends.nvlink.declaration import TOKENS
from turnout.moe.batch import TokensBatch
from turnout.moe.interface import DispatchSetup


class NvlinkDispatch:
    capability = TOKENS

    def __init__(self, setup: DispatchSetup) -> None:
        self.exchange = NvlinkAllToAll(setup)

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch, Sent]:
        return self.exchange.send(x_TH, topk_ids_TK, topk_weights_TK, tokens)

    def combine(self, out: Tensor, state: Sent) -> Tensor:
        return self.exchange.bring_back(out, state)
