"""No exchange: the runner sees this rank's own tokens and computes those of its experts.

With several ranks all of them must hold the same tokens; each then has a partial sum, which the layer
reduces (the plan says so).
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.moe.backends import DISPATCHER_CAPABILITIES
from turnout.moe.batch import Hidden, TokensBatch
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.parallel.topology import Topology


class NoDispatch:
    capability = DISPATCHER_CAPABILITIES["none"]

    def __init__(
        self, spec: MoESpec, plan: MoEPlan, phase: str, topology: Topology, device: torch.device
    ) -> None:
        """Nothing to allocate."""

    def dispatch(
        self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor
    ) -> tuple[TokensBatch, None]:
        hidden = Hidden(data=x_TH)
        return TokensBatch(hidden=hidden, topk_ids=topk_ids_TK, topk_weights=topk_weights_TK), None

    def combine(self, out_TH: Tensor, state: None) -> Tensor:
        return out_TH
