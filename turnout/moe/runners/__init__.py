"""Runners: the expert GEMMs, each in one file under the protocol below.

A runner is chosen by the layouts and formats it declares. It turns the canonical expert weights into
its own frozen form once and then maps batches to outputs. It knows no dispatcher and no other runner.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.capability import RunnerCapability
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec


class Experts(Protocol):
    """The experts of one layer, as the layer uses them."""

    def prepare(self, experts: ExpertWeights) -> None:
        """Take the weights into this runner's own form. It keeps no reference to what it converted, so
        that the canonical tensors go when the caller drops them."""
        ...

    def update(self, experts: ExpertWeights) -> None:
        """Replace all weights by `experts`, of the same shapes and format, in the same storage: captured
        graphs hold addresses."""
        ...

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        """tokens: [T, H], weighted and summed over k, of this rank's experts; experts: [E_loc, C, H],
        unweighted, zero beyond the counts. In the plan's compute dtype."""
        ...


class Runner(Experts, Protocol):
    """What a plan may choose: built from values alone, it holds weights only after `prepare`."""

    capability: ClassVar[RunnerCapability]

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None: ...

    def same_bits(self, tokens: int) -> range:
        """Sizes of "tokens" batches, around `tokens`, between which what a token gets differs in no bit,
        whatever else is in the batch; empty where nothing is promised. Known after `prepare`."""
        ...
