"""States of recurrent layers on a CPU, by one compiled kernel for single tokens and prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from turnout.attention.delta_rule import DeltaCell
from turnout.attention.states import RequestStates, Rows

if TYPE_CHECKING:
    from turnout.kernels.cpu.recurrent_layer import Requests


class CompiledStates(RequestStates):
    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        from turnout.kernels.cpu.delta_rule import advance
        from turnout.kernels.cpu.recurrent_layer import Requests

        self._advance, self._requests = advance, Requests

    def compiled(self, layer: int, rows: Rows) -> Requests | None:
        i = self.index[layer]
        return self._requests(rows.slots_B, rows.positions_B, rows.ends_B, self.windows[i], self.states[i])

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell, rows: Rows) -> Tensor:
        i, slots_B, positions_B = self.index[layer], rows.slots_B, rows.positions_B
        windows, states = self.windows[i], self.states[i]
        y_NY: Tensor = self._advance(
            mixed_NX, slots_B, positions_B, windows, states, *cell.learned, rows.ends_B
        )
        return y_NY
