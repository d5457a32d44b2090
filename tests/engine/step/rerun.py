"""Prefill graphs without CUDA: a piece is replayed by running the model again, up to where the piece ended.

The model runs in a thread that waits wherever a graph would begin, and says so wherever one would end.
Inputs, and what goes to attention and back, stand in the same tensors as on CUDA; attention runs between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Semaphore, Thread
from typing import Any

import torch

from turnout.engine.core import EngineCore
from turnout.engine.step.prefill_graphs import Captured, PrefillGraphs

PATIENCE = 60  # seconds


class Run:
    """A recorder of pieces, and what runs them again, one by one: `forward(recorder)` in a thread."""

    def __init__(self, forward: Callable[[Run], None]) -> None:
        self._forward, self._pieces = forward, 0
        self._go, self._done = Semaphore(0), Semaphore(0)
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        if self._thread is not None:
            assert self._go.acquire(timeout=PATIENCE)

    def end(self) -> Piece:
        if self._thread is not None:
            self._done.release()
        else:
            self._pieces += 1
        return Piece(self, self._pieces - 1)

    def replay(self, number: int) -> None:
        if number == 0:
            self._thread = Thread(target=self._again, daemon=True)
            self._thread.start()
        self._go.release()
        assert self._done.acquire(timeout=PATIENCE)
        if self._error is not None:
            raise self._error
        if number == self._pieces - 1:
            assert self._thread is not None
            self._thread.join(PATIENCE)

    @torch.inference_mode()
    def _again(self) -> None:
        try:
            self._forward(self)
        except BaseException as error:
            self._error = error
            self._done.release()


@dataclass(frozen=True)
class Piece:
    run: Run
    number: int

    def replay(self) -> None:
        self.run.replay(self.number)


class Rerun(PrefillGraphs):
    """steps: the sizes replayed so far, and how many tokens each was for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.steps: list[tuple[int, int]] = []
        super().__init__(*args, **kwargs)

    def _capture(self, size: int) -> Captured:
        self._warm_up(size)
        return self._record(size, Run(lambda recorder: self._run(size, recorder)))

    def _run(self, size: int, recorder: Run) -> None:
        cut = self._cut(size, recorder)
        recorder.begin()
        self._forward(size, cut)
        recorder.end()

    def run(self, step, size):
        self.steps.append((size, len(step.input_ids)))
        return super().run(step, size)


def with_prefill_graphs(
    core: EngineCore, sizes: Sequence[int], *, later: Sequence[int] = (), stored: bool = False
) -> Rerun:
    """Let `core` replay its steps with prompt tokens."""
    forward = core._forward
    dp_size = core.engine_plan.topology.dp_size
    with torch.inference_mode():
        graphs = Rerun(
            core._model,
            core._attention,
            sizes=sizes,
            later=later,
            stored=stored,
            dp_size=dp_size,
            progress=None,
        )
    core._model.reset_counts()
    forward.prefill_graphs = graphs
    return graphs
