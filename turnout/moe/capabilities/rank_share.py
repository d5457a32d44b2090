"""The arguments of the memory formulas that runners and dispatchers declare."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.formats.spec import token_bytes
from turnout.moe.spec import RankShape
from turnout.vocabulary import ActivationKind, Format, Layout


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a layer and the batches it gets: what a runner's workspace depends on."""

    shape: RankShape
    activation: ActivationKind
    rows: int  # the most tokens of a batch, or rows per local expert in the layout "batched_experts"
    layout: Layout
    decoded: bool  # whether weights are kept so
    itemsize: int  # bytes of the compute dtype
    activations: Format = Format.BF16  # what the GEMMs multiply with


@dataclass(frozen=True, kw_only=True)
class DispatchShare:
    """One rank's part of a layer and what is sent to it: what a dispatcher's buffers depend on."""

    shape: RankShape
    layout: Layout
    rows: int  # the most tokens that the rank receives in a step (budget.rows_seen)
    wire_format: Format
    combine_format: Format = Format.BF16  # of results on their way back; "bf16": the compute dtype
    itemsize: int = 2  # bytes of the compute dtype
    ranks: int = 1
    batches: int = 1  # that may be in flight at once

    @property
    def capacity(self) -> int:
        """Tokens that one rank sends, at most."""
        return self.rows // self.ranks

    @property
    def token(self) -> int:
        """Bytes of a hidden state on the wire, with its scales."""
        return token_bytes(self.wire_format, self.shape.hidden, itemsize=self.itemsize)

    @property
    def result(self) -> int:
        """Bytes of a result in the compute dtype."""
        return self.itemsize * self.shape.hidden


def received_bytes(share: DispatchShare) -> int:
    """Of a dispatcher that keeps what it receives: per row the token as dispatched, its result to combine,
    and ids and weights (8 k). The "batched_experts" layout keeps that many rows for every local expert, since
    all tokens may choose the same one."""
    experts = share.shape.local_experts if share.layout == Layout.BATCHED_EXPERTS else 1
    return share.rows * (experts * (share.token + share.result) + 8 * share.shape.top_k)
