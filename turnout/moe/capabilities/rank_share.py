"""What a runner and a dispatcher make room for on one rank: what formulas of memory are given."""

from __future__ import annotations

from dataclasses import dataclass

from turnout.formats.spec import token_bytes
from turnout.moe.spec import MoESpec
from turnout.vocabulary import Format, Layout


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a layer's experts and the batches it gets: what sizes of workspaces follow from."""

    spec: MoESpec
    rows: int  # the most tokens of a batch, or rows of a slab
    layout: Layout
    num_local_experts: int
    expert_tp: int  # ranks that divide the inner size
    decoded: bool  # whether weights are kept so
    itemsize: int  # bytes of the compute dtype
    activations: Format = Format.BF16  # what the GEMMs multiply with

    @property
    def inner(self) -> int:
        return self.spec.intermediate_size // self.expert_tp

    @property
    def gemm1(self) -> int:
        """Outputs of GEMM1."""
        return self.spec.w13_rows // self.expert_tp


@dataclass(frozen=True, kw_only=True)
class DispatchShare:
    """What a dispatcher's buffers hold on one rank: what their sizes follow from."""

    spec: MoESpec
    layout: Layout
    rows: int  # the most tokens that the rank receives in a step (budget.rows_seen)
    num_local_experts: int
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
        return token_bytes(self.wire_format, self.spec.hidden_size, itemsize=self.itemsize)

    @property
    def result(self) -> int:
        """Bytes of a result in the compute dtype."""
        return self.itemsize * self.spec.hidden_size


def received_bytes(share: DispatchShare) -> int:
    """Of a dispatcher that keeps what it receives: per row the token as dispatched, its result to combine,
    and ids and weights (8 k). The "batched_experts" layout keeps a slab of that many rows for every local
    expert, since all may choose the same one."""
    slabs = share.num_local_experts if share.layout == Layout.BATCHED_EXPERTS else 1
    return share.rows * (slabs * (share.token + share.result) + 8 * share.spec.top_k)
