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
from turnout.moe.batch import LateChoice, TokensBatch
from turnout.moe.capabilities.declared import DISPATCHERS
from turnout.moe.in_flight import Chunk, Fork, InFlight, StagedBatch, at_once, fork_on, in_chunks
from turnout.moe.interface import (
    ChoosingExperts,
    Dispatcher,
    DispatchSetup,
    Experts,
    Keep,
    LayerInOneCall,
    PlainExpert,
    RoutedExperts,
    RowExpert,
    prepare_anew,
)
from turnout.moe.plan import MoEPlan
from turnout.moe.routing import Router
from turnout.moe.runner_by_batch_size import make_runner
from turnout.moe.spec import MoESpec
from turnout.parallel.groups import SINGLE_RANK, Groups
from turnout.vocabulary import Layout, Phase, Reduce, SharedExpert


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
        experts: ExpertWeights | Callable[[], ExpertWeights],
        router_bias: Tensor | None = None,
        correction_bias: Tensor | None = None,
        experts_of_token: Tensor | None = None,
        shared_expert: Callable[[Tensor], Tensor] | None = None,
        groups: Groups = SINGLE_RANK,
        runner: Experts | None = None,
        keep: Keep = prepare_anew,
    ) -> None:
        """router_weight [E, H] and router_bias [E]: logits are computed in their dtype, on their device,
        which is the layer's. experts_of_token: see `Router`.
        experts: those of the plan's range, this rank's shard of each, or what reads them.
        shared_expert maps [T, H] to [T, H], or to float32 parts [P, T, H] of it on CUDA: this rank's share of
        the sum if the plan has it "sharded".
        runner: one without weights, to run the experts instead of the plan's. keep: gives a prepared one
        instead, if it has one.

        The caller's `experts` may be dropped afterwards: the runner keeps what it needs.
        """
        self.spec, self._plan = spec, plan
        self._shared_expert, self._groups = shared_expert, groups
        self._linear, self._router_weight = _router_product(plan, router_weight, router_bias)
        self._router_bias = router_bias
        device = router_weight.device
        self._row_expert = _of_row(shared_expert) if groups.world.size == 1 else None
        # Whether one call of the runner gives all there is to add for a token.
        whole = plan.num_local_experts == spec.num_experts and not self._exchanges
        self._is_whole_sum = whole and not plan.deterministic and shared_expert is None
        self._fork_shared: Fork = fork_on(device, "shared") if plan.overlap_shared_expert else at_once
        self._router = Router(
            spec.routing,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            device=device,
            correction_bias=correction_bias,
            experts_of_token=experts_of_token,
        )
        runner = runner or make_runner(spec, plan, device)
        self._runner, self._input_scale = keep("experts", partial(self._prepared, runner, experts, device))
        self._dispatchers = make_dispatchers(spec, plan, groups, device, self._input_scale)
        self.expert_counts = torch.zeros(spec.num_experts, dtype=torch.int64, device=device)
        self._in_one_call = self._bind() if experts_of_token is None and correction_bias is None else None

    def __call__(
        self,
        x_TH: Tensor,
        phase: Phase = Phase.PREFILL,
        tokens: Sequence[int] | None = None,
        real_T: Tensor | None = None,
        logits_PTE: Tensor | None = None,
        token_ids_T: Tensor | None = None,
        adds_parts: bool = False,
    ) -> Tensor:
        """x: [T, H] in the plan's compute dtype. tokens: how many each data-parallel rank brings; needed
        where there are several. real: bool [T], which rows are tokens, the others being padding; None: all.
        logits: float32 parts of x's product by `adds_parts_by`, where they are known; for one row the result
        may then be parts [P, T, H], for a norm that adds them up. token_ids: int64 [T], where experts are
        chosen by them. adds_parts: the result may be such parts of any rows (`TokensBatch`).
        """
        row_expert = self._row_expert if len(x_TH) == 1 and logits_PTE is not None else None
        shared = self._start_shared(x_TH) if row_expert is None else None
        whole_TH = x_TH
        x_TH, ids_TK, weights_TK, choice = self._route(x_TH, real_T, logits_PTE, token_ids_T)
        # Its weights are on their way while one program chooses.
        add = None if row_expert is None else row_expert.begin_row(whole_TH)
        dispatcher, experts = self._dispatchers[phase], self._runner
        combined = []
        for chunk in self._chunks(x_TH, ids_TK, weights_TK, phase, tokens):  # one, if buffers hold a step
            batch, state = dispatcher.dispatch(*chunk)
            if self._is_whole_sum and (adds_parts or choice is not None):
                assert isinstance(batch, TokensBatch)
                batch = replace(batch, adds_parts=adds_parts, choice=choice)
            out = experts(batch)
            combined.append(dispatcher.combine(out, state))
        return self._finish(combined, shared, phase) if add is None else add(combined[0])

    def of_sum(
        self,
        x_TH: Tensor,
        delta_TH: Tensor | None,
        gain_H: Tensor,
        eps: float,
        real_T: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """(x + delta, a call on the RMS norm of that times gain), where the runner does it all at once, which
        for few tokens on a CPU takes half of the time; else None. real: see a call."""
        if self._in_one_call is None or real_T is not None:
            return None
        return self._in_one_call(x_TH, delta_TH, gain_H, eps)

    def begin(
        self,
        x_TH: Tensor,
        phase: Phase = Phase.PREFILL,
        tokens: Sequence[int] | None = None,
        real_T: Tensor | None = None,
        token_ids_T: Tensor | None = None,
    ) -> InFlight:
        """A call in stages, for two-batch overlap: routes, and starts the dispatch on another stream."""
        shared = self._start_shared(x_TH)
        x_TH, ids_TK, weights_TK, _ = self._route(x_TH, real_T, None, token_ids_T)
        return StagedBatch(
            self._runner,
            self._dispatchers[phase],
            self._chunks(x_TH, ids_TK, weights_TK, phase, tokens),
            lambda combined: self._finish(combined, shared, phase),
            x_TH.device,
        )

    def update(self, experts: ExpertWeights) -> None:
        """Replace the experts' weights in place; shapes and format stay."""
        self._runner.update(self._checked(experts))
        if self._input_scale is not None and experts.input_scales is not None:
            self._input_scale.copy_(experts.input_scales.w13.max())

    @property
    def experts(self) -> Experts:
        return self._runner

    def reset_counts(self) -> None:
        self.expert_counts.zero_()

    @property
    def _exchanges(self) -> bool:
        """Whether a step may be anything but one batch, of tokens that are all here."""
        phases = [self._plan.phase(phase) for phase in Phase]
        apart = any(phase.layout != Layout.TOKENS or phase.chunk for phase in phases)
        return self._groups.world.size > 1 or apart

    def _bind(self) -> LayerInOneCall | None:
        """What computes the layer at once, where ranks exchange nothing and no other part takes part."""
        if self._exchanges or self._router_bias is not None or not isinstance(self._runner, RoutedExperts):
            return None
        spec, shared = self.spec, self._shared_expert
        weights = shared.plain if isinstance(shared, PlainExpert) else None
        if shared is not None and weights is None:
            return None
        return self._runner.with_router(
            self._router_weight, spec.routing, spec.top_k, self.expert_counts, weights
        )

    def _start_shared(self, x_TH: Tensor) -> Callable[[], Tensor] | None:
        """Start the shared expert, which needs nothing of routing; what is returned gives its [T, H]."""
        if self._shared_expert is None:
            return None
        return self._fork_shared(partial(self._shared_expert, x_TH))

    @property
    def adds_parts_by(self) -> Tensor | None:
        """The router's weight [E, H], where a call adds up parts of a product by it."""
        whole = self._router_bias is not None or self._linear is rowwise.linear
        return self._router_weight if self._router.adds_parts and not whole else None

    def _route(
        self,
        x_TH: Tensor,
        real_T: Tensor | None,
        logits: Tensor | None,
        token_ids_T: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, LateChoice | None]:
        """What experts read [T, H], int32 [T, k] expert ids, -1 for padding, and float32 [T, k] weights; or
        what the runner's kernels choose by, and ids and weights of any value."""
        choice = self._late_choice(x_TH, real_T, logits)
        if choice is not None:
            ids_1K = torch.empty(1, choice.top_k, dtype=torch.int32, device=x_TH.device)
            return x_TH, ids_1K, torch.empty_like(ids_1K, dtype=torch.float32), choice
        # A product per row, or parts [P, T, E] for a router that adds them up.
        if logits is None:
            weight_EH, bias_E = self._router_weight, self._router_bias
            if self._router.adds_parts:
                logits = rowwise.product(self._linear, x_TH, weight_EH, bias_E)
            else:
                logits = self._linear(x_TH.to(weight_EH.dtype), weight_EH, bias_E)
        ids_TK, weights_TK = self._router(logits, real_T, self.expert_counts, token_ids_T)
        if self.spec.routing.on_input:
            return (x_TH * weights_TK).to(x_TH.dtype), ids_TK, (ids_TK >= 0).to(weights_TK.dtype), None
        return x_TH, ids_TK, weights_TK, None

    def _late_choice(self, x_TH: Tensor, real_T: Tensor | None, logits: Tensor | None) -> LateChoice | None:
        """Of one token whose logits are known, where the runner's kernels choose, which saves a launch."""
        if len(x_TH) != 1 or logits is None or not self._is_whole_sum or self.spec.routing.on_input:
            return None
        if not isinstance(self._runner, ChoosingExperts) or not self._runner.chooses():
            return None
        return self._router.late(logits, real_T, self.expert_counts)

    def _chunks(
        self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, phase: Phase, tokens: Sequence[int] | None
    ) -> list[Chunk]:
        dp_rank, most = self._groups.topology.dp_rank, self._plan.phase(phase).chunk
        return in_chunks(x_TH, ids_TK, weights_TK, tokens or (len(x_TH),), dp_rank, most)

    def _finish(self, combined: list[Tensor], shared: Callable[[], Tensor] | None, phase: Phase) -> Tensor:
        """[T, H]: all chunks, the shared expert's output, and the sum over ranks that combine left to do."""
        out_TH = torch.cat(combined) if len(combined) > 1 else combined[0]
        if shared is not None and self._plan.shared_expert == SharedExpert.SHARDED:
            out_TH, shared = _sum(out_TH, shared()), None
        if self._plan.phase(phase).reduce == Reduce.LAYER:
            out_TH = self._groups.world.all_reduce(out_TH)
        return out_TH if shared is None else _sum(out_TH, shared())

    def _prepared(
        self,
        runner: Experts,
        experts: ExpertWeights | Callable[[], ExpertWeights],
        device: torch.device,
    ) -> tuple[Experts, Tensor | None]:
        """The runner with the weights, and `_input_scale`."""
        experts = experts() if callable(experts) else experts
        runner.prepare(self._checked(experts))
        return runner, input_scale_of(experts, device)

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


def _sum(out_TH: Tensor, shared: Tensor) -> Tensor:
    """shared: [T, H], or parts of it."""
    if shared.dim() == 2:
        return out_TH + shared
    from turnout.kernels.common.rows import add

    return add(shared, out_TH, out_TH.dtype)


def _router_product(plan: MoEPlan, weight: Tensor, bias: Tensor | None) -> tuple[rowwise.Linear, Tensor]:
    """What multiplies a layer's input by the router's weight, and that weight. A float32 one whose values are
    bfloat16's is kept in that where hidden states are: the same products, on tensor cores."""
    if plan.deterministic:
        return rowwise.linear, weight
    if weight.is_cuda and weight.dtype == torch.float32 and bias is None and plan.compute_dtype == "bfloat16":
        narrow = weight.bfloat16()
        if bool((narrow == weight).all()):
            return rowwise.wide_linear, narrow
    return F.linear, weight


def _of_row(shared_expert: object) -> RowExpert | None:
    return shared_expert if isinstance(shared_expert, RowExpert) and shared_expert.adds_row else None


def make_dispatchers(
    spec: MoESpec, plan: MoEPlan, groups: Groups, device: torch.device, input_scale: Tensor | None
) -> dict[Phase, Dispatcher]:
    """Each phase's planned dispatcher; collective over `groups.world`. input_scale: `DispatchSetup`'s."""
    return {
        phase: DISPATCHERS.load(plan.phase(phase).dispatcher)(
            DispatchSetup(
                spec=spec, plan=plan, phase=phase, groups=groups, device=device, input_scale=input_scale
            )
        )
        for phase in Phase
    }


def input_scale_of(experts: ExpertWeights, device: torch.device) -> Tensor | None:
    """float32 scalar: what the layer's input is quantised with before routing, hence one for all experts;
    None for weights without scales of activations."""
    scales = experts.input_scales
    return None if scales is None else scales.w13.max().to(device, torch.float32)
