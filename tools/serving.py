"""`turnout serve` on this machine under loads of several concurrencies, in one result file.

    python -m tools.serving demo --output benchmarks/results/serve-DEVICE-DATE.json
    TURNOUT_MAX_RUNNING_REQUESTS=128 TURNOUT_CUDA_GRAPH_MAX_BS=128 python -m tools.serving /dev/shm/qwen3-30b

The server takes its other flags from the environment (TURNOUT_<FLAG>). Each load is given twice and measured
the second time, so that nothing is compiled, and no connection opened, under the clock.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from turnout.bench.results import result, save
from turnout.bench.serve import ServeBench, measure, place
from turnout.config import ServerConfig, load
from turnout.server.launch import launch

SHOWN = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms")


def rows(model: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(a row for each load, where they ran)."""
    found = []
    start = time.perf_counter()
    with launch(load(ServerConfig, {"model": model, "port": 0})) as base_url:
        started = time.perf_counter() - start
        for concurrency in options.concurrency:
            bench = ServeBench(
                input_len=options.input_len,
                output_len=options.output_len,
                num_prompts=max(4, 2 * concurrency),
                max_concurrency=concurrency,
            )
            measure(ServeBench(input_len=options.input_len, output_len=8, num_prompts=concurrency), base_url)
            found.append({"model": Path(model).name, "start_s": started} | measure(bench, base_url))
            print(model, concurrency, {name: found[-1][name] for name in SHOWN}, flush=True)
        return found, place(base_url)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    measured: list[dict[str, Any]] = []
    for model in options.models:
        more, where = rows(model, options)
        measured += more
    flags = " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("TURNOUT_"))
    command = f"{flags} python -m tools.serving {' '.join(options.models)}".strip()
    if options.output is not None:
        save(result("serve", measured, command=command, **where), options.output)


if __name__ == "__main__":
    main()
