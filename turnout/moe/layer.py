"""One MoE layer: route -> dispatch -> experts -> combine, as its plan says.

It needs a spec, a plan and weights, and no server: a layer whose plan covers EP slice r of n, with no
reduction owed, returns that slice's partial sum in one process.

Legend: T tokens of this rank, H hidden, E experts, k top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from turnout.formats.experts import ExpertWeights
from turnout.kernels.common import rowwise
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.chunks import cut
from turnout.moe.interface import Dispatcher, DispatchSetup, Experts
from turnout.moe.overlap import Fork, at_once, fork
from turnout.moe.plan import MoEPlan
from turnout.moe.routing import Router
from turnout.moe.runner_by_batch_size import make_runner
from turnout.moe.spec import MoESpec
from turnout.moe.underway import Underway
from turnout.parallel.groups import ALONE, Groups
from turnout.vocabulary import Phase, Reduce, SharedExpert


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
        groups: Groups = ALONE,
        runner: Experts | None = None,
    ) -> None:
        """router_weight [E, H] and router_bias [E]: logits are computed in their dtype, on their device,
        which is the layer's. experts: those of the plan's range, this rank's shard of each.
        shared_expert maps [T, H] to [T, H]: this rank's share of the sum if the plan has it "sharded".
        runner: one without weights, to run the experts instead of the plan's.

        The caller's `experts` may be dropped afterwards: the runner keeps what it needs.
        """
        self._spec, self._plan = spec, plan
        self._router_weight, self._router_bias = router_weight, router_bias
        self._shared_expert, self._groups = shared_expert, groups
        self._linear = rowwise.linear if plan.deterministic else F.linear
        device = router_weight.device
        self._route = Router(
            spec.routing,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            device=device,
            correction_bias=correction_bias,
        )
        self._runner: Experts = runner or make_runner(spec, plan, device)
        self._runner.prepare(self._checked(experts))
        self._input_scale = _input_scale(experts, device)
        self._dispatchers: dict[Phase, Dispatcher] = {
            phase: DISPATCHERS.load(plan.phase(phase).dispatcher)(
                DispatchSetup(
                    spec=spec,
                    plan=plan,
                    phase=phase,
                    groups=groups,
                    device=device,
                    input_scale=self._input_scale,
                )
            )
            for phase in Phase
        }
        self.expert_counts = torch.zeros(spec.num_experts, dtype=torch.int64, device=device)

    def __call__(
        self,
        x_TH: Tensor,
        phase: Phase = Phase.PREFILL,
        tokens: Sequence[int] | None = None,
        real_T: Tensor | None = None,
    ) -> Tensor:
        """tokens: how many each data-parallel rank brings; needed where there are several. real: bool [T],
        which rows are tokens, the others being padding; None: all."""
        batch = self.begin(x_TH, phase, tokens, real_T)
        batch.compute()
        return batch.result()

    def begin(
        self,
        x_TH: Tensor,
        phase: Phase = Phase.PREFILL,
        tokens: Sequence[int] | None = None,
        real_T: Tensor | None = None,
        *,
        apart: bool = False,
    ) -> Underway:
        """Route a batch and start its dispatch; apart: on another stream, so that more can be computed."""
        plan, shared = self._plan, None
        if self._shared_expert is not None:  # needs nothing of what follows
            start = self._fork("shared", plan.shared_expert_beside)
            shared = start(partial(self._shared_expert, x_TH))
        logits = self._logits(x_TH.to(self._router_weight.dtype))
        ids_TK, weights_TK = self._route(logits, real_T, self.expert_counts)
        dispatcher, travel = self._dispatchers[phase], self._fork("travel", apart)
        dp_rank, most = self._groups.topology.dp_rank, plan.phase(phase).chunk
        first, *later = cut(x_TH, ids_TK, weights_TK, tokens or (len(x_TH),), dp_rank, most)
        return Underway(
            runner=self._runner,
            dispatcher=dispatcher,
            travel=travel,
            arrived=travel(lambda: dispatcher.dispatch(*first)),
            later=later,
            shared=shared,
            shared_in_sum=plan.shared_expert == SharedExpert.SHARDED,
            summed_by=self._groups.world if plan.phase(phase).reduce == Reduce.LAYER else None,
            kept=[x_TH, ids_TK, weights_TK],
        )

    def update(self, experts: ExpertWeights) -> None:
        """Replace the experts' weights in place; shapes and format stay."""
        self._runner.update(self._checked(experts))
        if self._input_scale is not None and experts.input_scales is not None:
            self._input_scale.copy_(experts.input_scales.w13.max())

    def reset_counts(self) -> None:
        self.expert_counts.zero_()

    def _logits(self, x_TH: Tensor) -> Tensor:
        """[T, E]; or parts [P, T, E] for a router that adds them up."""
        multiply = partial(rowwise.product, self._linear) if self._route.adds_parts else self._linear
        return multiply(x_TH, self._router_weight, self._router_bias)

    def _fork(self, name: str, apart: bool) -> Fork:
        device = self._router_weight.device
        return partial(fork, device, name) if apart and device.type == "cuda" else at_once

    def _checked(self, experts: ExpertWeights) -> ExpertWeights:
        plan = self._plan
        if (experts.first_expert, experts.num_local_experts) != (plan.first_expert, plan.num_local_experts):
            raise ValueError(
                f"weights of experts {experts.first_expert} + {experts.num_local_experts}, but the plan is "
                f"for {plan.first_expert} + {plan.num_local_experts}"
            )
        # A down-projection bias counts once, however many ranks share an expert.
        first_shard = self._groups.topology.expert_tp_rank == 0
        return experts if first_shard else replace(experts, b2=None)


def _input_scale(experts: ExpertWeights, device: torch.device) -> Tensor | None:
    """float32 scalar: what the layer's input is quantised with before routing, hence one for all experts."""
    scales = experts.input_scales
    return None if scales is None else scales.w13.max().to(device, torch.float32)
