"""Dispatchers: how tokens reach the ranks that hold their experts, each in one file.

A dispatcher declares the layout and formats it emits and whose tokens they are. It knows no runner and
no other dispatcher. What `combine` needs beyond the runner's output travels in the state that
`dispatch` returned with the batch, so several batches may be under way at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.capability import DispatcherCapability
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.parallel.groups import Groups


@dataclass(frozen=True, kw_only=True)
class DispatchSetup:
    """What a dispatcher is made of: a layer in one phase, and this rank among the others.

    input_scale: float32 scalar on the device, `amax / (6 * 448)` of the layer's input over all experts, for
    plans that quantise to NVFP4 before the wire; its value may change in place.
    """

    spec: MoESpec
    plan: MoEPlan
    phase: str
    groups: Groups
    device: torch.device
    input_scale: Tensor | None = None

    @property
    def wire_format(self) -> str:
        """How tokens travel."""
        return self.plan.phase(self.phase).wire_format

    @property
    def combine_format(self) -> str:
        """How results travel back."""
        return self.plan.phase(self.phase).combine_format

    @property
    def dtype(self) -> torch.dtype:
        """That of hidden states."""
        return getattr(torch, self.plan.compute_dtype)


class Dispatcher(Protocol):
    """Built once per layer and phase; every rank calls it for every batch, with tokens or without."""

    capability: ClassVar[DispatcherCapability]

    def __init__(self, setup: DispatchSetup) -> None: ...

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, tokens: Sequence[int]
    ) -> tuple[TokensBatch | ExpertsBatch, Any]:
        """This rank's tokens to the batch its runner sees, and the state for `combine`.

        tokens: how many each data-parallel rank brings, T being this one's.
        """
        ...

    def combine(self, out: Tensor, state: Any) -> Tensor:
        """The runner's output for that batch to [T, H] of this rank's tokens."""
        ...
