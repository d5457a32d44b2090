"""An all-to-all through torch.distributed, in whichever of its two forms costs less.

An all-gather sends everyone's tokens to all ranks and waits for nothing. An all-to-all-v sends a token to
those that hold an expert it chose, and its host waits for the counts, about 0.1 ms. Where a rank needs most
tokens anyway, the wait costs more than the bytes it saves: between four H200s, with top-8 of 128 experts and
128 tokens of 4096 values, all-to-all-v took 171 us to dispatch, of which its collectives were 37, and a
gather of all 46; with 2048 tokens 309, 182 and 198.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from turnout.moe.backends.collective.all_gather import AllGatherExchange
from turnout.moe.backends.collective.all_to_all_v import AllToAllVExchange
from turnout.moe.budget import reach
from turnout.moe.interface import DispatchSetup
from turnout.moe.wire_format import Wire

NEEDED_BY_MOST = 0.75


class Exchange(Protocol):
    """One layer's exchange over all ranks; every rank calls `send` and `bring_back` for every batch."""

    wire: Wire

    def send(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[Tensor, Any]:
        """The tokens sent to this rank, packed rows [N, W], and what their results need to return.

        tokens: those of each data-parallel rank. Ids and weights are whole, with experts that are held
        elsewhere: a runner computes its own.
        """
        ...

    def bring_back(self, out_NH: Tensor, receipt: Any) -> Tensor:
        """Results of the tokens received, to [T, H] of all of this rank's tokens, in the compute dtype."""
        ...


def make_exchange(setup: DispatchSetup) -> Exchange:
    """The form for this layer, the same on all ranks."""
    needed = reach(setup.spec.top_k, setup.groups.topology.ep_size)
    kind = AllGatherExchange if needed >= NEEDED_BY_MOST else AllToAllVExchange
    return kind(setup)
