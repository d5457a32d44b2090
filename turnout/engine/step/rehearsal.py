"""Steps in which no kernel of Triton's is launched, so that all those that are not compiled yet are at once.

A start would else compile some hundred kernels one after the other, each where it is first called, while
all but one of the host's cores rest: DeepSeek-V4's take a minute of one. What torch launches runs, on zeros
where a kernel would have written, which are indices as good as any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from turnout.engine.engine_plan import EnginePlan
from turnout.models.interface import Model
from turnout.moe.capabilities.declared import RUNNERS

# A block in which steps may be rehearsed, if it says True.
Rehearsal = Callable[[], AbstractContextManager[bool]]

aten = torch.ops.aten
ALLOCATES = frozenset(
    (
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    )
)


class Zeros(TorchDispatchMode):
    """What is allocated is zeros."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as nothing is compiled here; torch would import its compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in ALLOCATES:
            assert isinstance(made, Tensor)
            made.zero_()
        return made


def rehearsal(engine_plan: EnginePlan, model: Model) -> Rehearsal:
    """Of steps of this rank, by one layer of each kind. There is none where a step is more than kernels of
    Triton's and torch's own: with other ranks, whose kernels wait for each other and count the times, or with
    runners of libraries, whose kernels take zeros for what they are not."""
    if not compiles_ahead(engine_plan):
        return nothing
    threads = max(1, os.cpu_count() or 1)

    @contextmanager
    def rehearsing() -> Iterator[bool]:
        from turnout.kernels.common.compilation import compiling

        with compiling(threads), Zeros(), model.shortened():
            yield True

    return rehearsing


def compiles_ahead(engine_plan: EnginePlan) -> bool:
    """Whether steps of this plan may be rehearsed here."""
    hardware, plan = engine_plan.hardware, engine_plan.plan
    if hardware.device != "cuda" or engine_plan.topology.tp_size > 1:
        return False
    if engine_plan.config.deterministic or not all(RUNNERS[name].all_triton for name in plan.runners):
        return False
    from turnout.kernels.common.compilation import can_record

    return can_record()


@contextmanager
def nothing() -> Iterator[bool]:
    """Nothing is to be rehearsed."""
    yield False
