"""Requests of random sizes and numbers against a server, and whether it compiled a kernel for any of them.

    turnout serve /dev/shm/qwen3-30b --port 30000 &
    python -m tools.soak http://127.0.0.1:30000/v1 --seconds 60 --output benchmarks/results/soak-DEVICE.json

Rounds of 1 to --most-clients requests at once, of 1 to --most-tokens prompt tokens each, small numbers as
often as large ones. Exits with 1 if `turnout:kernels_compiled_after_ready_total` grew.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tools.command_line import parser_for
from turnout.bench.events import post
from turnout.bench.results import result, save
from turnout.bench.serve import place
from turnout.evals.client import served_model

COUNTER = "turnout:kernels_compiled_after_ready_total"


def compiled(base_url: str) -> int:
    """Kernels compiled since the server could serve. Raises ValueError where it does not say."""
    text = httpx.get(base_url.rstrip("/").removesuffix("/v1") + "/metrics", timeout=10).text
    found = [s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name == COUNTER]
    if not found:
        raise ValueError(f"{base_url} has no metric {COUNTER}")
    return int(sum(found))


async def ask(base_url: str, model: str, draw: random.Random, most: int) -> tuple[int, int]:
    """(prompt tokens, output tokens) of one request."""
    length = round(most ** draw.random())
    body = {
        "model": model,
        "prompt": [draw.randrange(10, 250) for _ in range(length)],
        "max_tokens": draw.randint(1, 32),
        "temperature": draw.choice([0, 1.0]),
        "seed": draw.randrange(2**31),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens = 0
    async for data in post(base_url, "completions", msgspec.json.encode(body)):
        if data != b"[DONE]" and (usage := msgspec.json.decode(data).get("usage")):
            tokens = usage["completion_tokens"]
    return length, tokens


async def soak(
    base_url: str, seconds: float, most_tokens: int, most_clients: int, seed: int
) -> dict[str, Any]:
    draw = random.Random(seed)
    async with httpx.AsyncClient(base_url=base_url.rstrip("/") + "/") as client:
        model = await served_model(client)
    before, start = compiled(base_url), time.perf_counter()
    done: list[tuple[int, int]] = []
    slowest = 0.0
    while time.perf_counter() - start < seconds:
        began, clients = time.perf_counter(), round(most_clients ** draw.random())
        done += await asyncio.gather(*(ask(base_url, model, draw, most_tokens) for _ in range(clients)))
        slowest = max(slowest, time.perf_counter() - began)
    return {
        "seconds": time.perf_counter() - start,
        "requests": len(done),
        "prompt_tokens": sum(length for length, _ in done),
        "prompt_lengths": len({length for length, _ in done}),
        "output_tokens": sum(tokens for _, tokens in done),
        "slowest_round_s": slowest,
        "kernels_compiled": compiled(base_url) - before,
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("base_url")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--most-tokens", type=int, default=2000)
    parser.add_argument("--most-clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    row = asyncio.run(
        soak(options.base_url, options.seconds, options.most_tokens, options.most_clients, options.seed)
    )
    print(row)
    if options.output is not None:
        save(result("soak", [row], **place(options.base_url)), options.output)
    sys.exit(int(row["kernels_compiled"] > 0))


if __name__ == "__main__":
    main()
