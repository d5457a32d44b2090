"""How long a call takes, and what the device reaches at best.

CPU: contenders in turn, a few calls each, so that whatever disturbs one disturbs all; the first of a turn
does not count, since it finds the caches full of somebody else's data. CUDA: replays of a graph of
calls, between events, so that launching costs nothing; a contender that waits for the host cannot be
captured and is timed call by call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

SECONDS = 0.7  # per point and contender, about
MIN_CALLS, MAX_CALLS = 6, 200
TURN = 3  # calls that count
REPLAYS = 15

Call = Callable[[], Any]


def interleaved(contenders: Sequence[Sequence[Call]]) -> list[float]:
    """The median time of a call of each, in us; each is a list of like calls, taken one after another.

    Whoever has had SECONDS, and MIN_CALLS, drops out.
    """
    times: list[list[float]] = [[] for _ in contenders]
    spent = [0.0] * len(contenders)
    for turn in range(MAX_CALLS // TURN):
        for place, calls in enumerate(contenders):
            if len(times[place]) < MIN_CALLS or spent[place] < SECONDS:
                first = turn * (TURN + 1)
                taken = [_seconds(calls[i % len(calls)]) for i in range(first, first + TURN + 1)]
                times[place] += taken[1:]
                spent[place] += sum(taken)
    return [1e6 * statistics.median(mine) for mine in times]


def on_gpu(calls: Sequence[Call]) -> tuple[float, str]:
    """The median time of a call in us, and how it was taken: "graph" or "eager"."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:  # it waits for the host
        torch.cuda.synchronize()
        return _in_turn(calls), "eager"
    graph.replay()
    return statistics.median(_on_device_us(graph.replay) for _ in range(REPLAYS)) / len(calls), "graph"


def _in_turn(calls: Sequence[Call]) -> float:
    def synchronised(call: Call) -> Call:
        def run() -> None:
            call()
            torch.cuda.synchronize()

        return run

    return interleaved([[synchronised(call) for call in calls]])[0]


def measure_ceilings(device: str) -> dict[str, float]:
    """Copying (read + write, GB/s), and a large product of random matrices (TFLOP/s)."""
    dtype, label, size = (torch.float32, "fp32", 1024) if device == "cpu" else (torch.bfloat16, "bf16", 8192)
    count = 2**26 if device == "cpu" else 2**30
    source = torch.ones(count, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    if device == "cpu":
        copy_us, gemm_us = (min(_seconds(work) for _ in range(10)) * 1e6 for work in
                            (lambda: target.copy_(source), lambda: a @ b))  # fmt: skip
    else:
        # A copy by a kernel, as kernels read and write; `copy_` in a graph goes through the copy engine.
        copy_us, gemm_us = (
            _events(work) for work in (lambda: torch.add(source, 1, out=target), lambda: a @ b)
        )
    ceilings = {
        "copy_GBps": 2 * source.nbytes / copy_us / 1e3,
        f"{label}_TFLOPs": 2 * size**3 / gemm_us / 1e6,
    }
    if device != "cpu" and torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device=device)
        a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
        fp8_us = _events(lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=dtype))
        ceilings["fp8_TFLOPs"] = 2 * size**3 / fp8_us / 1e6
    return ceilings


def _events(call: Call) -> float:
    """The median time of a call that is long enough to hide its own launch, in us."""
    return statistics.median([_on_device_us(call) for _ in range(3 + REPLAYS)][3:])


def _on_device_us(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
