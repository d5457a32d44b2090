"""What tools that time kernels share: where they run, compiling ahead, timing, errors, and results.

Of an H200, with which times are compared: BYTES_PER_S of a copy, PRODUCTS_PER_S of bfloat16 products (a
multiplication and an addition are two), and its PROCESSORS.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.command_line import parser_for
from turnout.bench.results import check_output, gpu_driver, result, save
from turnout.packages import versions_of
from turnout.parallel.hardware import PRESETS, cpu_name

BYTES_PER_S, PRODUCTS_PER_S = 4.2e12, 790e12
PROCESSORS = PRESETS["h200"].multiprocessors


def device_parser(description: str | None) -> argparse.ArgumentParser:
    """With --device, where "cpu" interprets kernels, and --output."""
    parser = parser_for(description)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path)
    return parser


def device_of(options: argparse.Namespace) -> torch.device:
    """Of `device_parser`'s options. Raises UserError if --output cannot be written."""
    check_output(options.output)
    if options.device == "cpu":
        interpret_kernels()
    return torch.device(options.device)


def interpret_kernels() -> None:
    """Have Triton, which is not imported yet, interpret kernels."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels import interpreter

    interpreter.prepare()


def compile_ahead(launch: Callable[[], object]) -> int:
    """Compile, in a process for each core, all kernels that `launch` launches, without a launch; how many."""
    from turnout.kernels.common.compilation import compilers, recording, submit

    with recording() as records:
        launch()
    with compilers() as pool:
        wait(submit(pool, records))
    return len(records)


def copied_bytes_per_s(device: torch.device) -> float:
    """Of this device's memory, read and written by a copy of 1 GiB, the median of ten; of what a GPU's caches
    do not hold."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    times = [seconds_of(lambda: to.copy_(source), device)[0] for _ in range(10)]
    return 2 * len(source) / statistics.median(times)


def seconds_of(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Of a run: on the device, in a CUDA graph, and of the host to launch it."""
    if device.type == "cpu":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began,) * 2
    from triton.testing import do_bench_cudagraph

    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return do_bench_cudagraph(run, rep=100) / 1e3, host


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """In the root mean square."""
    return float((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def line(row: dict[str, Any]) -> str:
    """A result's names and values, floats with four digits."""
    return " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


def keep(
    benchmark: str, rows: list[dict[str, Any]], options: argparse.Namespace, packages: Sequence[str] = ()
) -> None:
    """Save results where --output says; nowhere if it does not. packages: whose versions count too."""
    if options.output is None:
        return
    on_cpu = getattr(options, "device", "cuda") == "cpu"
    name = cpu_name() if on_cpu else torch.cuda.get_device_name()
    content = result(benchmark, rows, device=name, driver=gpu_driver())
    content["versions"] |= versions_of(packages)
    save(content, options.output)
