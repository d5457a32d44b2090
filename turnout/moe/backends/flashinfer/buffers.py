"""Memory of FlashInfer's one-sided all-to-all, in bytes, by the formulas of its source (0.7.2).

No torch here: plans count by the formula that memory is made by.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnout.moe.budget import aligned
from turnout.moe.capabilities.rank_share import DispatchShare


def buffer_bytes(share: DispatchShare) -> int:
    """One workspace serves all layers."""
    sizes = WorkspaceSizes(
        ranks=share.ranks,
        capacity=share.capacity,
        sent=share.token + 8 * share.shape.top_k,
        returned=share.result,
    )
    return sizes.total_bytes


@dataclass(frozen=True, kw_only=True)
class WorkspaceSizes:
    """One rank's workspace of FlashInfer's one-sided all-to-all, into which its peers write.

    capacity: rows that each of `ranks` may send. sent, returned: bytes of a row on its way to the experts,
    with ids and weights, and back. The formulas are those of `moe_a2a_get_workspace_size_per_rank`.
    """

    ranks: int
    capacity: int
    sent: int
    returned: int

    @property
    def bookkeeping(self) -> int:
        """An epoch and a counter; counters by rank, sent and received; two flags by rank; then, for each of
        a rank's own tokens and up to 22 experts, the rank it went to and its row there."""
        routes = aligned(4 * 22 * self.capacity)
        return aligned(8 + 8 * self.ranks) + 2 * aligned(4 * self.ranks) + 2 * routes

    @property
    def results_at(self) -> int:
        """Where results begin: behind the rows received, if all senders send all they may."""
        return self.bookkeeping + aligned(self.ranks * self.capacity * self.sent)

    @property
    def total_bytes(self) -> int:
        return self.results_at + aligned(self.ranks * self.capacity * self.returned)
