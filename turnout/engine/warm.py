"""What is settled between loading and serving, once for all ranks: the cuts of library kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from turnout.config import cache_folder
from turnout.engine.blueprint import Blueprint
from turnout.models.interface import ProgressFn
from turnout.moe.flashinfer import autotune
from turnout.moe.runners import Experts
from turnout.parallel.groups import Groups
from turnout.registry import RUNNERS


class Tuner:
    """Makes the runners of a model's layers, and tunes with the first: all layers have the same sizes."""

    def __init__(
        self, blueprint: Blueprint, device: torch.device, make_runner: Callable[[int], Experts] | None = None
    ) -> None:
        """make_runner: gives the runner of a layer instead of the plan."""
        self._blueprint, self._device, self._make = blueprint, device, make_runner or self._planned
        self._first: Experts | None = None

    def make_runner(self, layer: int) -> Experts:
        runner = self._make(layer)
        self._first = self._first or runner
        return runner

    def tune(self, groups: Groups, progress: ProgressFn | None) -> None:
        """Collective. Raises UserError where ranks cannot share tactics."""
        blueprint, runner, self._first = self._blueprint, self._first, None
        if runner is None or not autotune.wanted(blueprint.plan):
            return
        autotune.tune(
            runner,
            blueprint.description.moe,
            blueprint.plan,
            device=self._device,
            device_name=blueprint.hardware.name,
            world=groups.world,
            folder=cache_folder(),
            progress=progress,
        )

    def _planned(self, layer: int) -> Experts:
        plan = self._blueprint.plan
        runner: Experts = RUNNERS.get(plan.prefill.runner)(
            self._blueprint.description.moe, plan, self._device
        )
        return runner
