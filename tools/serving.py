"""`turnout serve` on this machine under loads of several concurrencies, in one result file.

    python -m tools.serving demo --output benchmarks/results/serve-DEVICE-DATE.json
    TURNOUT_MAX_RUNNING_REQUESTS=128 TURNOUT_CUDA_GRAPH_MAX_BS=128 python -m tools.serving /dev/shm/qwen3-30b

The server is started without a prefix cache and takes its other flags from the environment (TURNOUT_<FLAG>);
or give the --base-url of one that runs, and the names of its flags as --flags. Each load is preceded by a
short one of other prompts, so that nothing new happens under the clock and nothing that is measured was seen
before. A row says how many of its prompt tokens came from a prefix cache all the same. Its `gpu_busy` is the
part of the load in which a kernel ran, as the driver counts it, the mean over the GPUs of
CUDA_VISIBLE_DEVICES; None without a GPU, or for a load too short to count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from tools.command_line import parser_for
from turnout.bench.results import result, save
from turnout.bench.serve import ServeBench, measure, place
from turnout.config import ServerConfig, load
from turnout.server.launch import launch

SHOWN = (
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_tpot_ms",
    "p99_itl_ms",
    "gpu_busy",
    "client_busy",
)
SAMPLE_MS = 100  # between two readings of the GPU's utilization
COUNTED_FROM = 10  # a reading is of up to a second before it: the first ones are of the time before a load


@contextmanager
def watched_gpu() -> Iterator[dict[str, float | None]]:
    """Fills in `gpu_busy` at its end: the mean part of the time in which the GPUs were at work, 0 to 1."""
    found: dict[str, float | None] = {"gpu_busy": None}
    asked = ("--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits")
    command = ["nvidia-smi", *asked, f"-lms={SAMPLE_MS}"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    if shutil.which(command[0]) is None:
        yield found
        return
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            yield found
        finally:
            watcher.terminate()
        assert watcher.stdout is not None
        found["gpu_busy"] = mean_utilization(watcher.stdout.read())


def mean_utilization(printed: str) -> float | None:
    """Of lines `GPU, percent`, the mean share of all GPUs after the first readings of each."""
    of_gpu: dict[str, list[float]] = {}
    for line in printed.splitlines():
        gpu, _, percent = line.partition(", ")
        if percent.isdecimal():  # not of a GPU that does not count it, nor of a line that was cut off
            of_gpu.setdefault(gpu, []).append(int(percent) / 100)
    counted = [share for shares in of_gpu.values() for share in shares[COUNTED_FROM:]]
    return mean(counted) if counted else None


def rows(model: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a row for each load, where they ran)."""
    found = []
    server: AbstractContextManager[str] = nullcontext(options.base_url)
    if not options.base_url:
        server = launch(load(ServerConfig, {"model": model, "port": 0, "disable_prefix_cache": True}))
    with server as base_url:
        for i, concurrency in enumerate(options.concurrency):
            bench = ServeBench(
                input_len=options.input_len,
                output_len=options.output_len,
                num_prompts=max(16, options.waves * concurrency),
                max_concurrency=concurrency,
                seed=2 * i,
            )
            warm_up = replace(bench, output_len=8, num_prompts=concurrency, seed=2 * i + 1)
            measure(warm_up, base_url)
            with watched_gpu() as watched:
                row = measure(bench, base_url)
            found.append({"model": Path(model).name} | row | watched)
            print(model, concurrency, {name: found[-1].get(name) for name in SHOWN}, flush=True)
        return found, place(base_url)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--waves", type=int, default=4, help="prompts for each client, 16 in all at least")
    parser.add_argument("--base-url", default="")
    parser.add_argument("--flags", default="", help="how the server was started, for the record")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    measured: list[dict[str, Any]] = []
    for model in options.models:
        more, where = rows(model, options)
        measured += more
    flags = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("TURNOUT_")]
    command = " ".join([*flags, "python -m tools.serving", *options.models, options.flags]).strip()
    if options.output is not None:
        save(result("serve", measured, command=command, **where), options.output)


if __name__ == "__main__":
    main()
