"""One MoE layer: route -> dispatch -> experts -> combine, as its plan says.

It needs a spec, a plan and weights, and no server: a layer whose plan covers EP slice r of n, with no
reduction owed, returns that slice's partial sum in one process.

Legend: T tokens of this rank, H hidden, E experts, k top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from turnout.formats.experts import ExpertWeights
from turnout.moe.dispatch import Dispatcher
from turnout.moe.plan import MoEPlan
from turnout.moe.routing import route
from turnout.moe.runners import Experts
from turnout.moe.spec import MoESpec
from turnout.parallel.topology import Topology
from turnout.registry import DISPATCHERS, RUNNERS


class MoELayer:
    """Callable `[T, H] -> [T, H]` with T >= 0. All ranks call it together, with tokens or without.

    expert_counts: int64 [E] on the device, how often the router chose each expert since `reset_counts`.
    """

    def __init__(
        self,
        spec: MoESpec,
        plan: MoEPlan,
        *,
        router_weight: Tensor,
        experts: ExpertWeights,
        router_bias: Tensor | None = None,
        correction_bias: Tensor | None = None,
        shared_expert: Callable[[Tensor], Tensor] | None = None,
        topology: Topology = Topology(),
        runner: Experts | None = None,
    ) -> None:
        """router_weight [E, H] and router_bias [E]: logits are computed in their dtype, on their device,
        which is the layer's. experts: those of the plan's range, this rank's shard of each.
        shared_expert maps [T, H] to [T, H]; TP-sharded where the layer reduces, else unsharded.
        runner: one without weights, to run the experts instead of the plan's.

        The caller's `experts` may be dropped afterwards: the runner keeps what it needs.
        """
        self._spec, self._plan = spec, plan
        self._router_weight, self._router_bias = router_weight, router_bias
        self._correction_bias = correction_bias
        self._shared_expert = shared_expert
        self._first_shard = topology.expert_tp_rank == 0
        device = router_weight.device
        self._runner: Experts = runner or RUNNERS.get(plan.prefill.runner)(spec, plan, device)
        self._runner.prepare(self._checked(experts))
        self._dispatchers: dict[str, Dispatcher] = {
            phase: DISPATCHERS.get(plan.phase(phase).dispatcher)(spec, plan, phase, topology, device)
            for phase in ("prefill", "decode")
        }
        self.expert_counts = torch.zeros(spec.num_experts, dtype=torch.int64, device=device)

    def __call__(self, x_TH: Tensor, phase: str = "prefill") -> Tensor:
        logits_TE = F.linear(x_TH.to(self._router_weight.dtype), self._router_weight, self._router_bias)
        ids_TK, weights_TK = route(logits_TE, self._spec.routing, self._spec.top_k, self._correction_bias)
        chosen = ids_TK.flatten().long()
        self.expert_counts.scatter_add_(0, chosen, torch.ones_like(chosen))  # unlike bincount, no host wait
        dispatcher = self._dispatchers[phase]
        batch, state = dispatcher.dispatch(x_TH, ids_TK, weights_TK)
        out_TH = dispatcher.combine(self._runner(batch), state)
        if self._shared_expert is not None:
            out_TH = out_TH + self._shared_expert(x_TH)
        if self._plan.phase(phase).reduce == "layer":
            dist.all_reduce(out_TH)
        return out_TH

    def update(self, experts: ExpertWeights) -> None:
        """Replace the experts' weights in place; shapes and format stay."""
        self._runner.update(self._checked(experts))

    def reset_counts(self) -> None:
        self.expert_counts.zero_()

    def _checked(self, experts: ExpertWeights) -> ExpertWeights:
        plan = self._plan
        if (experts.first_expert, experts.num_local_experts) != (plan.first_expert, plan.num_local_experts):
            raise ValueError(
                f"weights of experts {experts.first_expert} + {experts.num_local_experts}, but the plan is "
                f"for {plan.first_expert} + {plan.num_local_experts}"
            )
        # A down-projection bias counts once, however many ranks share an expert.
        return experts if self._first_shard else replace(experts, b2=None)
