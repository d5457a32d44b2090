"""How long a server takes from its command line to its first answer.

    python -m tools.random_checkpoint /dev/shm/qwen3-30b
    python -m tools.start_times /dev/shm/qwen3-30b --output benchmarks/results/start-DEVICE-DATE.json

Starts `turnout serve` several times, one after another, and asks each server for a token as soon as it says
that it is ready. `ready_s` and `answer_s` count from the start of the process; `phases_s` are those that the
engine itself reports (turnout:startup_seconds), from when a rank begins. `compiled` counts the kernels that
are new in Triton's cache on disk: the first start compiles them, unless an earlier one of the same model did.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tools.command_line import parser_for
from turnout.bench.results import device_of, result, save
from turnout.config import ServerConfig
from turnout.parallel.hardware import detect
from turnout.server.launch import ServerProcess

PHASE = "turnout:startup_seconds"


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("model")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with httpx.Client(timeout=60) as client:
        rows = [row_of(options.model, client) for _ in range(options.starts)]
    if options.output is not None:
        save(result("start", rows, **device_of(detect())), options.output)


def row_of(model: str, client: httpx.Client) -> dict[str, Any]:
    """Of one start."""
    cached = count_kernels()
    began = time.monotonic()
    server = ServerProcess(ServerConfig(model=model, port=0), show=False)
    try:
        url = server.wait_ready()
        ready = time.monotonic() - began
        body = {"model": Path(model).name, "prompt": [1], "max_tokens": 1}
        answer = client.post(f"{url}/completions", json=body)
        answer.raise_for_status()
        answered = time.monotonic() - began
        phases = phases_of(client.get(f"{url.removesuffix('/v1')}/metrics").text)
    finally:
        server.stop()
    row = {
        "model": Path(model).name,
        "ready_s": round(ready, 2),
        "answer_s": round(answered, 2),
        "compiled": count_kernels() - cached,
        "phases_s": phases,
    }
    print(row, flush=True)
    return row


def phases_of(metrics: str) -> dict[str, float]:
    return {
        sample.labels["phase"]: round(sample.value, 2)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == PHASE
    }


def count_kernels() -> int:
    """In Triton's cache on disk."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return sum(1 for _ in folder.rglob("*.cubin"))


if __name__ == "__main__":
    main()
