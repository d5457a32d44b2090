"""A batch on its way through an MoE layer, in stages: its tokens travel, are computed, and travel back.

Two batches take turns. While one travels, on a stream of its own, the other computes:

    compute  attention A | attention B | experts A | experts B  | attention A ...
    travel               | dispatch A  | dispatch B | combine A | combine B

so whoever has two of them (models.decoder) starts both before computing either. Travels follow each other in
the same order on every rank, and so do computations, which may therefore share one workspace.

A batch in chunks (chunks.py) travels and computes one chunk after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from turnout.moe.chunks import Given
from turnout.moe.interface import Dispatcher, Experts
from turnout.moe.overlap import Fork
from turnout.parallel.groups import Group


@dataclass
class Underway:
    """`compute` and `result` are called once each, in this order.

    arrived: joins the dispatch, and gives what it gave. later: chunks that have yet to set out. shared:
    joins the shared expert, and gives its part, which belongs to the sum over ranks or is added after it.
    summed_by: the ranks that owe that sum, if combine does not make it. kept: what other streams may still
    read.
    """

    runner: Experts
    dispatcher: Dispatcher
    travel: Fork
    arrived: Callable[[], tuple[Any, Any]]
    later: Sequence[Given]
    shared: Callable[[], Tensor] | None
    shared_in_sum: bool
    summed_by: Group | None
    kept: list[Any]
    _computed: tuple[Any, ...] = field(default=(), init=False)
    _returned: list[Callable[[], Tensor]] = field(default_factory=list, init=False)

    def compute(self) -> None:
        """Run the experts on what has arrived, and send the results back."""
        self._pass_on(self.arrived)
        for chunk in self.later:
            self._pass_on(self.travel(partial(self.dispatcher.dispatch, *chunk)))

    def _pass_on(self, arrived: Callable[[], tuple[Any, Any]]) -> None:
        batch, state = arrived()  # after the combine before it, whose output may go now
        out = self.runner(batch)
        self._computed = (batch, state, out)
        self._returned.append(self.travel(lambda: self.dispatcher.combine(out, state)))

    def result(self) -> Tensor:
        """[T, H] of this rank's tokens."""
        parts, shared = [returned() for returned in self._returned], self.shared
        out_TH = torch.cat(parts) if self.later else parts[0]
        if shared is not None and self.shared_in_sum:
            out_TH, shared = out_TH + shared(), None
        if self.summed_by is not None:
            out_TH = self.summed_by.all_reduce(out_TH)
        if shared is not None:
            out_TH = out_TH + shared()
        self.kept.clear()
        self._computed = ()
        return out_TH
