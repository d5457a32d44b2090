"""Runners of a plan that choose among their kernels before they serve, as their declarations say."""

from __future__ import annotations

from collections.abc import Callable

import torch

from turnout.cache import cache_folder
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.interface import Experts
from turnout.moe.plan import MoEPlan
from turnout.moe.spec import MoESpec
from turnout.parallel.groups import Group
from turnout.registry import load


def autotune(
    runner: Experts,
    spec: MoESpec,
    plan: MoEPlan,
    *,
    device: torch.device,
    device_name: str,
    world: Group,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Collective over `world`, all ranks. `runner` holds weights of one layer. What was chosen is kept in the
    cache.

    Raises UserError where ranks cannot share a choice.
    """
    for target in dict.fromkeys(RUNNERS[name].autotuner for name in plan.runners):
        if target:
            load(target)(
                runner,
                spec,
                plan,
                device=device,
                device_name=device_name,
                world=world,
                folder=cache_folder(),
                progress=progress,
            )
