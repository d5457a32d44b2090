"""Runners with one fault each, made from one without, and a way to offer them to plans."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from turnout.formats.experts import ExpertWeights
from turnout.moe.backends.torch.runner import TorchRunner
from turnout.moe.batch import ExpertsBatch, TokensBatch
from turnout.moe.capabilities.declared import RUNNERS

WRONG = 2  # the expert that WrongExpert gets wrong


class WrongExpert(TorchRunner):
    """Holds another expert's down projection in the place of one's own."""

    def prepare(self, experts: ExpertWeights) -> None:
        order = torch.arange(experts.num_local_experts)
        order[order == WRONG - experts.first_expert] = 0
        super().prepare(replace(experts, w2=experts.w2[order]))


class PaddingLeaks(TorchRunner):
    """NaN, rather than zero, for a token without experts."""

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        out = super().__call__(batch)
        if isinstance(batch, TokensBatch):
            out[(batch.topk_ids < 0).all(1)] = torch.nan
        return out


class NeedsTokens(TorchRunner):
    """Cannot be called without tokens."""

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        if not batch.hidden.data.numel():
            raise ZeroDivisionError("no tokens")
        return super().__call__(batch)


class Drifts(TorchRunner):
    """Other last bits at each call, well within the bound."""

    calls = 0

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        self.calls += 1
        return super().__call__(batch) * (1 + 1e-7 * (self.calls % 2))


class MindsCompany(TorchRunner):
    """Other last bits in large batches, where the same ones were promised."""

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        return super().__call__(batch) * (1 + 1e-7 * (len(batch.hidden.data) > 1))


class WrongType(TorchRunner):
    """float64, whatever the plan says."""

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        return super().__call__(batch).double()


class Dawdles(TorchRunner):
    """Right, but slow."""

    def __call__(self, batch: TokensBatch | ExpertsBatch) -> Tensor:
        time.sleep(0.01)
        return super().__call__(batch)


class CannotPrepare(TorchRunner):
    def prepare(self, experts: ExpertWeights) -> None:
        raise RuntimeError("no kernel for this shape\nwith a long story")


BROKEN = {
    cls.__name__: cls
    for cls in (
        WrongExpert,
        PaddingLeaks,
        NeedsTokens,
        Drifts,
        MindsCompany,
        WrongType,
        Dawdles,
        CannotPrepare,
    )
}


def offer(monkeypatch: pytest.MonkeyPatch, *names: str, **fields) -> None:
    """Let plans choose these, before all others where `fields` say preference=...; until the test ends."""
    for name in names:
        declared = replace(RUNNERS["torch"], name=name, implementation=f"{__name__}:{name}", **fields)
        monkeypatch.setitem(RUNNERS.entries, name, declared)
        monkeypatch.setattr(BROKEN[name], "capability", declared)
