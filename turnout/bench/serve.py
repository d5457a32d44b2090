"""`turnout bench serve`: throughput and latencies of a server under load, over streaming HTTP.

Times are host times at the client, from the first request on: prompts and what the server is asked about
itself come before. A connection is kept for the next request. TTFT: request sent to first token; ITL: between
tokens of a stream; TPOT = (end-to-end latency - TTFT) / (output tokens - 1); E2EL: end-to-end latency.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from turnout.bench.events import Connections
from turnout.bench.results import check_output, gpu_driver, result, save
from turnout.config import ServerConfig, load
from turnout.errors import UserError
from turnout.evals.client import counter, served_model
from turnout.parallel.hardware import cpu_name
from turnout.server.launch import launch

console = Console()
TIMEOUT = 600  # seconds of one request


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """One load. Prompts are token ids drawn uniformly from [low_id, high_id). extra: further fields of each
    request."""

    input_len: int = 64
    output_len: int = 64
    num_prompts: int = 128
    request_rate: float = float("inf")
    max_concurrency: int = 32
    ignore_eos: bool = True
    seed: int = 0
    low_id: int = 10
    high_id: int = 250
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least_one = {
            "--random-input-len": self.input_len,
            "--random-output-len": self.output_len,
            "--num-prompts": self.num_prompts,
            "--max-concurrency": self.max_concurrency,
        }
        for flag, value in least_one.items():
            if value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        if not self.request_rate > 0:
            raise UserError(f"--request-rate {self.request_rate}: must be positive")

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.seed)
        return [
            [rng.randrange(self.low_id, self.high_id) for _ in range(self.input_len)]
            for _ in range(self.num_prompts)
        ]


class Choice(msgspec.Struct):
    text: str | None = None


class Usage(msgspec.Struct):
    completion_tokens: int


class Event(msgspec.Struct):
    """What is read of one; the rest is skipped, which takes less than to decode it."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: dict[str, Any] | None = None


EVENTS = msgspec.json.Decoder(Event)


@dataclass
class Trace:
    """What one request experienced: seconds since it was sent."""

    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0


def run(
    bench: ServeBench,
    *,
    model: str | None,
    base_url: str = "",
    api_key: str = "",
    output: Path | None = None,
) -> dict:
    """Serve `model` (or use `base_url`), apply the load, print a table; returns the result."""
    check_output(output)
    server: AbstractContextManager[str] = (
        launch(load(ServerConfig, {"model": model, "port": 0, "api_key": api_key or None}))
        if model
        else nullcontext(base_url)
    )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with server as url:
        row = measure(bench, url, headers)
        where = place(url, headers)
    content = result("serve", [row], **where)
    table = Table("metric", "value")
    for name, value in row.items():
        table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    console.print(table)
    if output:
        save(content, output)
    return content


def place(base_url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Device, how many, and driver of a server, as a result wants them; this machine if it does not say."""
    url = base_url.rstrip("/").removesuffix("/v1") + "/server_info"
    try:
        info = httpx.get(url, timeout=10, headers=headers).json()
        hardware, ranks = info["engine"]["hardware"], info["ranks"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return {"device": cpu_name()}
    if hardware["device"] == "cpu":
        return {"device": cpu_name()}
    return {"device": hardware["name"], "devices": len(ranks), "driver": gpu_driver()}


def measure(bench: ServeBench, base_url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Apply the load once; a row with throughputs per second and latencies in milliseconds.

    cached_prompt_tokens: prompt tokens that the server took from its prefix cache meanwhile, None where it
    does not say. client_busy: the part of a core that this client took: near 1 it measures itself.
    """
    cached = "cached_prompt_tokens_total"
    before = counter(base_url, cached)
    traces, seconds, busy_seconds = asyncio.run(_load(bench, base_url, headers))
    after = counter(base_url, cached)
    tokens = sum(trace.tokens for trace in traces)
    row: dict[str, Any] = {
        "num_prompts": bench.num_prompts,
        "max_concurrency": bench.max_concurrency,
        "request_rate": bench.request_rate if bench.request_rate != float("inf") else "inf",
        "input_len": bench.input_len,
        "output_len": bench.output_len,
        "cached_prompt_tokens": None if before is None or after is None else int(after - before),
        "duration_s": seconds,
        "client_busy": busy_seconds / seconds,
        "output_tokens": tokens,
        "request_throughput": len(traces) / seconds,
        "output_throughput": tokens / seconds,
    }
    tpot = [(t.latency - t.ttft) / (t.tokens - 1) for t in traces if t.tokens > 1]
    for name, values in (
        ("ttft", [t.ttft for t in traces]),
        ("tpot", tpot),
        ("itl", [gap for t in traces for gap in t.gaps]),
        ("e2el", [t.latency for t in traces]),
    ):
        row |= _summary(name, values)
    return row


def _summary(name: str, seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(1000 * s for s in seconds)
    return {
        f"mean_{name}_ms": statistics.mean(ordered),
        f"median_{name}_ms": statistics.median(ordered),
        f"p99_{name}_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


async def _load(
    bench: ServeBench, base_url: str, headers: Mapping[str, str] | None
) -> tuple[list[Trace], float, float]:
    """(what each request experienced, seconds from the first one to the last one's end, and of a core that
    this process took meanwhile)."""
    gate = asyncio.Semaphore(bench.max_concurrency)
    rng = random.Random(bench.seed + 1)
    columns = (TextColumn("bench serve"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with httpx.AsyncClient(base_url=base_url.rstrip("/") + "/", headers=headers) as client:
        model = await served_model(client)
    prompts = bench.prompts()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=bench.num_prompts)

        async def one(prompt: list[int]) -> Trace:
            async with gate:
                try:
                    async with asyncio.timeout(TIMEOUT):
                        trace = await _stream(connections, model, prompt, bench)
                except (OSError, ValueError) as error:
                    why = error or type(error).__name__
                    raise UserError(f"{base_url}: a request failed ({why})") from None
            progress.advance(bar)
            return trace

        start, taken = time.perf_counter(), time.process_time()
        try:
            with closing(Connections(base_url, headers)) as connections:
                async with asyncio.TaskGroup() as group:
                    tasks = []
                    for prompt in prompts:
                        tasks.append(group.create_task(one(prompt)))
                        if bench.request_rate != float("inf"):
                            await asyncio.sleep(rng.expovariate(bench.request_rate))
        except* UserError as errors:
            raise errors.exceptions[0] from None
        ends = time.perf_counter() - start, time.process_time() - taken
        return [task.result() for task in tasks], *ends


async def _stream(connections: Connections, model: str, prompt: list[int], bench: ServeBench) -> Trace:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": bench.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if bench.ignore_eos:
        body["ignore_eos"] = True
    body |= bench.extra
    trace, start, last = Trace(), time.perf_counter(), 0.0

    def take(data: bytes) -> None:
        nonlocal last
        if data == b"[DONE]":
            return
        event = EVENTS.decode(data)
        if event.error:
            raise ValueError(event.error.get("message", event.error))
        now = time.perf_counter()
        if event.usage:
            trace.tokens = event.usage.completion_tokens
        if not event.choices:
            return
        if not trace.ttft:  # also where the first token is part of a character, and so has no text yet
            trace.ttft = last = now - start
        elif event.choices[0].text:
            trace.gaps.append(now - start - last)
            last = now - start

    await connections.request("completions", msgspec.json.encode(body), take)
    trace.latency = time.perf_counter() - start
    return trace
