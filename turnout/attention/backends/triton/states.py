"""States of recurrent layers on CUDA: a launch for single tokens, and four for 1024 tokens of a prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from turnout.attention.delta_rule import DeltaCell
from turnout.attention.states import RequestStates, Rows


class TritonStates(RequestStates):
    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        from turnout.kernels.attention.delta_prompt import advance
        from turnout.kernels.attention.delta_rule import FEW, step

        self._advance, self._step, self.most_in_parts = advance, step, FEW
        self._done_X = torch.zeros(FEW * self.states.shape[2], dtype=torch.int32, device=self.device)

    def go_on(self, cell: DeltaCell, mixed_TX: Tensor, window_WC: Tensor, state_HKV: Tensor) -> Tensor:
        y_TY: Tensor = self._advance(mixed_TX, window_WC, state_HKV, *cell.learned)
        return y_TY

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell, rows: Rows) -> Tensor:
        i, slots_B, positions_B = self.index[layer], rows.slots_B, rows.positions_B
        windows, states = self.windows[i], self.states[i]
        y_BY: Tensor = self._step(
            mixed_NX, slots_B, positions_B, windows, states, *cell.learned, self._done_X
        )
        return y_BY
