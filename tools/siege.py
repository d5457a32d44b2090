"""`turnout serve` under hostile clients, and what ordinary ones notice of it, in one result file.

    python -m tools.siege demo --output benchmarks/results/siege-DEVICE-DATE.json
    python -m tools.siege --base-url http://127.0.0.1:30000/v1 --seconds 10 --attacks messages texts

Each attack runs for --seconds with --clients clients, in a process of its own. At the same time some streams
run whose pauses are measured, /health is asked for again and again, and the server's memory is read. Sends to
this machine only.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import os
import socket
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from tools.attacks import ATTACKS, CLIENTS, PATIENCE, Found, Target, connected, status, streaming
from tools.command_line import parser_for
from turnout.bench.events import post
from turnout.bench.results import check_output, result, save
from turnout.config import ServerConfig, load
from turnout.errors import UserError
from turnout.parallel.hardware import cpu_name
from turnout.server.launch import launch

PROBE_SECONDS = 0.02  # between questions for /health, and readings of memory
SETTLE_SECONDS = 3.0  # after an attack
TOKENS = 200  # of each stream
MB = 2**20


class Witness:
    """Ordinary clients, and the server's memory, while an attack runs."""

    def __init__(self, target: Target, pid: int, streams: int):
        self.health: list[float] = []
        self.pauses: list[float] = []
        self.first: list[float] = []
        self.server: list[int] = []
        self.bodies: list[int] = []
        self._target, self._pid, self._streams = target, pid, streams

    async def watch(self, done: asyncio.Event) -> None:
        tasks = [self._probe(done), self._read_memory(done)]
        tasks += [self._stream(done) for _ in range(self._streams)]
        await asyncio.gather(*tasks)

    async def _probe(self, done: asyncio.Event) -> None:
        request = b"GET /health HTTP/1.1\r\nHost: siege\r\nConnection: close\r\n\r\n"
        while not done.is_set():
            start = time.perf_counter()
            async with asyncio.timeout(PATIENCE), connected(self._target) as (reader, writer):
                writer.write(request)
                if await status(reader) != "200":
                    raise UserError("/health did not answer 200")
            self.health.append(time.perf_counter() - start)
            await asyncio.sleep(PROBE_SECONDS)

    async def _stream(self, done: asyncio.Event) -> None:
        content = streaming(self._target, max_tokens=TOKENS, logprobs=0)
        while not done.is_set():
            last, is_first = time.perf_counter(), True
            try:
                async for _ in post(self._target.base_url, "completions", content):
                    now = time.perf_counter()
                    (self.first if is_first else self.pauses).append(now - last)
                    last, is_first = now, False
            except UserError as error:  # a full queue is an answer
                if "HTTP 503" not in str(error):
                    raise
                await asyncio.sleep(0.1)

    async def _read_memory(self, done: asyncio.Event) -> None:
        while not done.is_set():
            server, bodies = memory(self._pid)
            self.server.append(server)
            self.bodies.append(bodies)
            await asyncio.sleep(PROBE_SECONDS)


def memory(pid: int) -> tuple[int, int]:
    """Resident bytes of the server's process, and of the one that parses large bodies."""
    server, bodies = psutil.Process(pid), 0
    with suppress(psutil.NoSuchProcess):
        for child in server.children():
            if any("large_bodies" in word for word in child.cmdline()):
                bodies = child.memory_info().rss
    return server.memory_info().rss, bodies


async def attackers(name: str, target: Target, clients: int, seconds: float) -> Found:
    """One attack, in a process of its own. Raises UserError if that fails or does not end."""
    arguments = (name, target.host, target.port, target.model, clients, seconds)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.attacks", *map(str, arguments)), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(seconds + 2 * PATIENCE):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise UserError(f"the clients of {name!r} did not come to an end") from None
    if process.returncode:
        raise UserError(f"the clients of {name!r} ended with exit code {process.returncode}")
    answer = json.loads(said)
    return Found(Counter(answer["ends"]), answer["seconds"])


async def phase(name: str, target: Target, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """One attack and what was seen of it, as a row; "none" is the same without an attack."""
    clients = 0 if name == "none" else max(options.clients, CLIENTS.get(name, 0))
    before, load_before = memory(pid), os.getloadavg()[0]
    witness, done, found = Witness(target, pid, options.streams), asyncio.Event(), Found()
    watching = asyncio.create_task(witness.watch(done))
    if clients:
        found = await attackers(name, target, clients, options.seconds)
    else:
        await asyncio.sleep(options.seconds)
    done.set()
    await watching
    await asyncio.sleep(SETTLE_SECONDS)
    after = memory(pid)
    return {
        "attack": name,
        "clients": clients,
        "seconds": options.seconds,
        "load_before": round(load_before, 2),
        "answers": dict(sorted(found.ends.items())),
        **summary("answer", found.seconds),
        "streams": options.streams,
        **summary("health", witness.health),
        **summary("first_token", witness.first),
        **summary("pause", witness.pauses),
        "rss_before_mb": round(before[0] / MB, 1),
        "rss_peak_mb": round(max(witness.server) / MB, 1),
        "rss_after_mb": round(after[0] / MB, 1),
        "body_process_peak_mb": round(max(witness.bodies) / MB, 1),
        "body_process_after_mb": round(after[1] / MB, 1),
    }


def summary(name: str, seconds: list[float]) -> dict[str, float]:
    """Count, median, 99th percentile and maximum, in milliseconds."""
    if not seconds:
        return {f"{name}_count": 0}
    ordered = sorted(seconds)
    at = {"p50": len(ordered) // 2, "p99": int(0.99 * len(ordered)), "max": len(ordered) - 1}
    return {f"{name}_count": len(ordered)} | {
        f"{name}_{k}_ms": round(1000 * ordered[i], 1) for k, i in at.items()
    }


def locate_target(base_url: str) -> tuple[Target, int]:
    """The server at `base_url` and its process. Raises UserError unless it is on this machine."""
    url = urlsplit(base_url)
    port = url.port or 80
    address = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)[0][4][0]
    if not ipaddress.ip_address(address).is_loopback:
        raise UserError(
            f"--base-url {base_url}: is not on this machine; siege sends to loopback addresses only"
        )
    with httpx.Client(base_url=f"http://{url.netloc}", timeout=PATIENCE) as http:
        info = http.get("/server_info").json()
    return Target(str(address), port, info["model"]), info["pid"]


def siege(base_url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each attack."""
    target, pid = locate_target(base_url)
    rows = []
    for name in ("none", *options.attacks):
        rows.append(asyncio.run(phase(name, target, pid, options)))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    parser = parser_for(__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument(
        "--base-url", default="", help="of a server on this machine, instead of one of its own"
    )
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack; at most 600")
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    if not (0 < options.seconds <= 600 and 0 < options.clients <= 200 and 0 < options.streams <= 64):
        parser.error("--seconds up to 600, --clients up to 200, --streams up to 64, all positive")
    return options


def main() -> None:
    options = parse_options()
    check_output(options.output)
    server: AbstractContextManager[str] = nullcontext(options.base_url)
    if not options.base_url:
        server = launch(load(ServerConfig, {"model": options.model, "port": 0}))
    with server as base_url:
        rows = siege(base_url, options)
    if options.output is not None:
        save(result("siege", rows, device=cpu_name()), options.output)


if __name__ == "__main__":
    main()
