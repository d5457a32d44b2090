"""Timing what several ranks do together, and repeating the collectives that something made."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from turnout.parallel.groups import Group

WARMUP, CALLS = 8, 40
BUSY = 8192  # size of the product before each call on CUDA: 1.4 ms on an H200, for launches to get ahead

Call = Callable[[], Any]


class Recorded(Group):
    """A group that remembers its calls, so that they can be made again without what surrounds them."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner.ranks, inner.rank)
        self._inner = inner
        self._repeats: list[Call] = []
        self.sent_bytes = 0  # to others

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
        return self._call(self._inner.all_reduce, x)

    def all_gather(self, x_R: Tensor, counts: Sequence[int]) -> Tensor:
        self.sent_bytes += (self.size - 1) * x_R.nbytes
        return self._call(self._inner.all_gather, x_R, counts)

    def reduce_scatter(self, x_R: Tensor, counts: Sequence[int]) -> Tensor:
        self.sent_bytes += _row_bytes(x_R) * (sum(counts) - counts[self.rank])
        return self._call(self._inner.reduce_scatter, x_R, counts)

    def all_to_all(self, x_R: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        self.sent_bytes += _row_bytes(x_R) * (sum(send) - send[self.rank])
        return self._call(self._inner.all_to_all, x_R, send, receive)

    def taken(self) -> list[Call]:
        """The calls since the last look, to be made again."""
        taken, self._repeats = self._repeats, []
        return taken

    def _call(self, method: Callable[..., Tensor], x: Tensor, *counts: Sequence[int]) -> Tensor:
        self._repeats.append(partial(method, x.clone(), *counts))
        return method(x, *counts)


class Clock:
    """Times calls that start on all ranks at once."""

    def __init__(self, world: Group, device: torch.device) -> None:
        self._world, self._device = world, device
        self._one = torch.ones(1, device=device)
        if device.type == "cuda":
            self._busy = torch.ones(BUSY, BUSY, device=device, dtype=torch.bfloat16)

    def median_us(self, calls: Sequence[Call]) -> float:
        """The median of one call, on the rank where it is largest; `calls` are taken in turn."""
        times = [self._time(calls[i % len(calls)]) for i in range(WARMUP + CALLS)]
        own = torch.tensor([1e6 * statistics.median(times[WARMUP:])], device=self._device)
        return max(self._world.all_gather(own, [1] * self._world.size).tolist())

    def median_graph_us(self, calls: Sequence[Call]) -> float:
        """The median of one call of a graph of all, on the rank where it is largest. CUDA only."""
        for call in calls:
            call()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return self.median_us([graph.replay]) / len(calls)

    def median_pair_us(
        self, first: Sequence[Call], second: Sequence[Callable[[Any], Any]]
    ) -> tuple[float, float]:
        """The same of a call and of one that takes what it returned, one right after the other."""
        both: list[tuple[float, float]] = []
        for i in range(WARMUP + CALLS):
            found: list[Any] = []
            there = self._time(partial(_keep, first[i % len(first)], found))
            both.append((there, self._time(partial(second[i % len(second)], found[0]))))
        own = torch.tensor(
            [[1e6 * statistics.median(times[WARMUP:]) for times in zip(*both, strict=True)]],
            device=self._device,
        )
        slowest = self._world.all_gather(own, [1] * self._world.size).amax(0).tolist()
        return slowest[0], slowest[1]

    def _time(self, call: Call) -> float:
        """Seconds."""
        if self._device.type == "cpu":
            self._world.all_reduce(self._one)
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(self._busy, self._busy)
        self._world.all_reduce(self._one)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def repeat(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _keep(call: Call, found: list[Any]) -> None:
    found.append(call())


def _row_bytes(x_R: Tensor) -> int:
    return x_R[:1].nbytes
