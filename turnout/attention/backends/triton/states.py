"""States of recurrent layers on CUDA: a launch for single tokens, and one over the blocks of a prompt, which
torch prepares."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from turnout.attention.delta_rule import DeltaCell
from turnout.attention.states import RequestStates, Rows


class TritonStates(RequestStates):
    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        from turnout.kernels.attention.delta_rule import carry_states, step

        self.carry, self._step = carry_states, step

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell, rows: Rows) -> Tensor:
        i, slots_B, positions_B = self.index[layer], rows.slots_B, rows.positions_B
        windows, states = self.windows[i], self.states[i]
        y_BY: Tensor = self._step(mixed_NX, slots_B, positions_B, windows, states, *cell.learned)
        return y_BY
