"""What a runner is to make room for."""

from __future__ import annotations

from dataclasses import dataclass

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
