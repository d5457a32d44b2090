"""Runners of a plan: one, or two that take batches by their number of tokens.

planning/runner_by_batch_size.py decides, this computes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.interface import Experts, LayerInOneCall, PlainWeights, RoutedExperts, Runner
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec, Routing


def make_runner(spec: MoESpec, plan: MoEPlan, device: torch.device) -> Experts:
    """What computes the experts of one layer as planned."""
    if plan.runner_by_batch_size:
        return RunnerByBatchSize(spec, plan, device)
    runner: Experts = RUNNERS.load(plan.prefill.runner)(spec, plan, device)
    return runner


def _named(name: str, spec: MoESpec, plan: MoEPlan, device: torch.device) -> Runner:
    """The runner `name` in the place of the plan's two."""
    single = replace(
        plan,
        prefill=replace(plan.prefill, runner=name),
        decode=replace(plan.decode, runner=name),
        tiles=plan.tiles if RUNNERS[name].tuning is not None else (),
        runner_by_batch_size=(),
    )
    runner: Runner = RUNNERS.load(name)(spec, single, device)
    return runner


class RunnerByBatchSize:
    """Several runners, each with the weights in its own form; a batch goes to the one for its size."""

    def __init__(self, spec: MoESpec, plan: MoEPlan, device: torch.device) -> None:
        self._bounds = [most for most, _ in plan.runner_by_batch_size]
        self.parts = {name: _named(name, spec, plan, device) for name in dict.fromkeys(plan.runners)}
        self._runners = [self.parts[name] for _, name in plan.runner_by_batch_size]
        first, *others = (runner.capability for runner in self.parts.values())
        self.capability = replace(
            first,
            deterministic=first.deterministic and all(other.deterministic for other in others),
            graph_safe=first.graph_safe and all(other.graph_safe for other in others),
            batch_invariant=False,
        )

    def with_router(
        self,
        router_weight: Tensor,
        routing: Routing,
        top_k: int,
        counts: Tensor,
        shared: PlainWeights | None = None,
    ) -> LayerInOneCall | None:
        """See `RoutedExperts`: of the runner for the fewest tokens, as long as it computes them."""
        fewest, most = self._runners[0], self._bounds[0]
        if not isinstance(fewest, RoutedExperts):
            return None
        at_once = fewest.with_router(router_weight, routing, top_k, counts, shared)
        if at_once is None:
            return None
        return lambda x_NH, delta_NH, gain_H, eps: (
            at_once(x_NH, delta_NH, gain_H, eps) if len(x_NH) <= most else None
        )

    def prepare(self, experts: ExpertWeights) -> None:
        for runner in self.parts.values():
            runner.prepare(experts)

    def update(self, experts: ExpertWeights) -> None:
        for runner in self.parts.values():
            runner.update(experts)

    def same_bits(self, tokens: int) -> range:
        """What the runner for this size promises, among sizes that it computes."""
        place = bisect_left(self._bounds, tokens)
        promised = self._runners[place].same_bits(tokens)
        low = self._bounds[place - 1] + 1 if place else 0
        return range(max(promised.start, low), min(promised.stop, self._bounds[place] + 1))

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        assert isinstance(batch, TokensBatch), "sizes of batches are in tokens"
        return self._runners[bisect_left(self._bounds, len(batch.topk_ids))](batch)
