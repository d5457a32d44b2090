"""A batch on its way through an MoE layer, in stages: its tokens travel, are computed, and travel back.

Two batches take turns. While one travels, on a stream of its own, the other computes:

    compute  attention A | attention B | experts A | experts B  | attention A ...
    travel               | dispatch A  | dispatch B | combine A | combine B

so whoever has two of them (models.decoder) starts both before computing either. Travels follow each other in
the same order on every rank, and so do computations, which may therefore share one workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from turnout.moe.dispatch import Dispatcher
from turnout.moe.overlap import Fork
from turnout.moe.runners import Experts
from turnout.parallel.groups import Group


@dataclass
class Underway:
    """`compute` and `result` are called once each, in this order.

    arrived: joins the dispatch, and gives what it gave. shared: joins the shared expert, and gives its part,
    which belongs to the sum over ranks or is added after it. summed_by: the ranks that owe that sum, if
    combine does not make it. kept: what other streams may still read.
    """

    runner: Experts
    dispatcher: Dispatcher
    travel: Fork
    arrived: Callable[[], tuple[Any, Any]]
    shared: Callable[[], Tensor] | None
    shared_in_sum: bool
    summed_by: Group | None
    kept: list[Any]
    _returned: Callable[[], Tensor] = field(init=False)

    def compute(self) -> None:
        """Run the experts on what has arrived, and send the results back."""
        batch, state = self.arrived()
        out = self.runner(batch)
        self.kept += (batch, state, out)
        self._returned = self.travel(lambda: self.dispatcher.combine(out, state))

    def result(self) -> Tensor:
        """[T, H] of this rank's tokens."""
        out_TH, shared = self._returned(), self.shared
        if shared is not None and self.shared_in_sum:
            out_TH, shared = out_TH + shared(), None
        if self.summed_by is not None:
            out_TH = self.summed_by.all_reduce(out_TH)
        if shared is not None:
            out_TH = out_TH + shared()
        self.kept.clear()
        return out_TH
