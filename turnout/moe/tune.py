"""How long runners take for a layer's own weights and inputs, so that a plan can choose by measurement.

Each batch size is timed for all runners in turn, a few calls each, so that whatever disturbs one disturbs
all; what counts is the fastest turn. On CUDA a turn replays a graph of calls, where the runner can be
captured, so that launching costs nothing, as in serving; else the calls are made one by one.

Legend: T tokens, k top-k.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from turnout.moe.batch import TokensBatch
from turnout.moe.interface import Runner
from turnout.moe.verify import Inputs

TOKENS = (1, 4, 16, 64, 256, 1024)
TURNS = 7
TURN_SECONDS = 0.02  # calls of one turn take about so long together
MOST_CALLS = 50


def times(
    runners: Mapping[str, Runner], inputs: Inputs, most: int, progress: Callable[[int, int], None]
) -> dict[str, dict[int, float]]:
    """Runner -> tokens -> us of a call. runners: prepared; inputs: at least one token, on their device."""
    sizes = [tokens for tokens in TOKENS if tokens <= most] or [most]
    found: dict[str, dict[int, float]] = {name: {} for name in runners}
    for done, tokens in enumerate(sizes):
        progress(done, len(sizes))
        batch = inputs.repeated(tokens).batch
        turns = {name: _turn(runner, batch) for name, runner in runners.items()}
        for name, microseconds in _fastest(turns).items():
            found[name][tokens] = microseconds
    progress(len(sizes), len(sizes))
    return found


class _Turn:
    """Some calls of one runner with one batch; called, it gives the microseconds of one."""

    def __init__(self, calls: Callable[[], object], count: int, wait: Callable[[], None]) -> None:
        self._calls, self._count, self._wait = calls, count, wait

    def __call__(self) -> float:
        self._wait()
        started = time.perf_counter()
        self._calls()
        self._wait()
        return 1e6 * (time.perf_counter() - started) / self._count


def _turn(runner: Runner, batch: TokensBatch) -> _Turn:
    on_cuda = batch.topk_ids.device.type == "cuda"
    wait = torch.cuda.synchronize if on_cuda else _no_wait
    runner(batch)  # compiles
    once = _Turn(lambda: runner(batch), 1, wait)
    once()
    count = max(1, min(MOST_CALLS, int(1e6 * TURN_SECONDS / once())))

    def calls() -> None:
        for _ in range(count):
            runner(batch)

    if on_cuda and runner.capability.graph_safe:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        return _Turn(graph.replay, count, wait)
    return _Turn(calls, count, wait)


def _fastest(turns: Mapping[str, _Turn]) -> dict[str, float]:
    rounds: Sequence[dict[str, float]] = [
        {name: turn() for name, turn in turns.items()} for _ in range(TURNS)
    ]
    return {name: min(taken[name] for taken in rounds) for name in turns}


def _no_wait() -> None:
    """Nothing runs behind a CPU's back."""
