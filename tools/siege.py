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
import multiprocessing
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from turnout.bench.events import post
from turnout.bench.results import cpu_name, result, save
from turnout.config import ServerConfig, load
from turnout.errors import UserError
from turnout.server.launch import launch

BODY = 4 * 2**20  # bytes, the server's default limit
PROBE_SECONDS = 0.02  # between questions for /health, and readings of memory
SETTLE_SECONDS = 3.0  # after an attack
PATIENCE = 60.0  # seconds for one answer
MB = 2**20


def numbers(size: int = BODY) -> bytes:
    """Messages that are numbers, of which a validator could find two million faults."""
    return b'{"messages":[' + b"0," * (size // 2 - 10) + b"0]}"


def text(size: int = BODY) -> bytes:
    """A prompt that takes seconds to tokenise."""
    words = "the quick brown fox " * (size // 20 - 5)
    return json.dumps({"prompt": words, "max_tokens": 1}).encode()


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    model: str

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"


@dataclass
class Found:
    """What an attack got: how its requests ended, and after how many seconds."""

    ends: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def add(self, end: str, start: float) -> None:
        self.ends[end] += 1
        self.seconds.append(time.perf_counter() - start)


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: siege", f"Content-Length: {length}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


async def status(reader: asyncio.StreamReader) -> str:
    """The status of the answer; "closed" if there is none."""
    words = (await reader.readline()).split()
    return words[1].decode() if len(words) > 1 else "closed"


Attack = Callable[[Target, Found, float], Awaitable[None]]  # until time.perf_counter() reaches the third


def sending(path: str, body: Callable[[], bytes]) -> Attack:
    """One body again and again, on a new connection each time."""

    async def attack(target: Target, found: Found, until: float) -> None:
        content = body()
        while time.perf_counter() < until:
            start = time.perf_counter()
            async with connected(target) as (reader, writer):
                writer.write(head(path, len(content), "Connection: close"))
                writer.write(content)
                found.add(await status(reader), start)

    return attack


def trickling(first: bytes, piece: bytes) -> Attack:
    """A piece each half second, until the server has had enough."""

    async def attack(target: Target, found: Found, until: float) -> None:
        while time.perf_counter() < until:
            start = time.perf_counter()
            async with connected(target) as (reader, writer):
                writer.write(first)
                answer = asyncio.create_task(status(reader))
                while not answer.done() and time.perf_counter() < until:
                    with suppress(OSError):
                        writer.write(piece)
                    await asyncio.wait({answer}, timeout=0.5)
                found.add(answer.result() if answer.done() else "still open", start)
                answer.cancel()

    return attack


def streaming(target: Target, **fields: Any) -> bytes:
    body = {"model": target.model, "prompt": "Ann has 3 pears.", "stream": True, "ignore_eos": True}
    return json.dumps(body | fields).encode()


async def not_reading(target: Target, found: Found, until: float) -> None:
    """Many tokens asked for, and none read."""
    start = time.perf_counter()
    content = streaming(target, n=4, max_tokens=300, logprobs=5)
    connection = socket.create_connection((target.host, target.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with connection:
        connection.sendall(head("/v1/completions", len(content)) + content)
        await asyncio.sleep(max(0.0, until - time.perf_counter()))
        connection.setblocking(False)
        words = connection.recv(64).split()
        found.add(words[1].decode() if len(words) > 1 else "closed", start)


async def vanishing(target: Target, found: Found, until: float) -> None:
    """In turns: amid a large body, before the answer to one, amid a stream."""
    large, stream = text(), streaming(target, max_tokens=200)
    while time.perf_counter() < until:
        for content, part in ((large, len(large) // 2), (large, len(large)), (stream, len(stream))):
            start = time.perf_counter()
            async with connected(target) as (reader, writer):
                writer.write(head("/v1/completions", len(content)) + content[:part])
                await writer.drain()
                if content is stream:
                    await reader.readline()
            found.add("left", start)


async def flooding(target: Target, found: Found, until: float) -> None:
    """Small requests as fast as they are answered, fifty at once for each client."""

    async def one() -> None:
        content = json.dumps({"model": target.model, "prompt": [7], "max_tokens": 1}).encode()
        while time.perf_counter() < until:
            start = time.perf_counter()
            async with connected(target) as (reader, writer):
                writer.write(head("/v1/completions", len(content)) + content)
                found.add(await status(reader), start)

    await asyncio.gather(*(one() for _ in range(50)))


PARTIAL = head("/v1/completions", BODY) + b'{"prompt":"'
ATTACKS: dict[str, Attack] = {
    "messages": sending("/v1/chat/completions", numbers),
    "texts": sending("/v1/completions", text),
    "slow heads": trickling(b"POST /v1/completions HTTP/1.1\r\nHost: siege\r\n", b"X-Slow: a\r\n"),
    "slow bodies": trickling(PARTIAL, b"a"),
    "slow readers": not_reading,
    "vanishing": vanishing,
    "flood": flooding,
}
CLIENTS = {"slow heads": 50, "slow bodies": 50}  # where sockets cost the clients nothing


def besiege(name: str, target: Target, clients: int, seconds: float, answer: Any) -> None:
    """Run one attack in this process; a `Found` goes to the connection `answer`."""
    found = Found()

    async def client(until: float) -> None:
        while time.perf_counter() < until:
            start = time.perf_counter()
            try:
                async with asyncio.timeout(until - start + PATIENCE):
                    await ATTACKS[name](target, found, until)
            except (OSError, TimeoutError) as error:
                found.add(type(error).__name__, start)
                await asyncio.sleep(0.1)

    async def everyone() -> None:
        until = time.perf_counter() + seconds
        await asyncio.gather(*(client(until) for _ in range(clients)))

    asyncio.run(everyone())
    answer.send(found)


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
        content = streaming(self._target, max_tokens=200, logprobs=0)
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


async def phase(name: str, target: Target, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """One attack and what was seen of it, as a row; "none" is the same without an attack."""
    clients = 0 if name == "none" else max(options.clients, CLIENTS.get(name, 0))
    before, load_before = memory(pid), os.getloadavg()[0]
    witness, done, found = Witness(target, pid, options.streams), asyncio.Event(), Found()
    watching = asyncio.create_task(witness.watch(done))
    if clients:
        spawn = multiprocessing.get_context("spawn")
        receiving, sending_end = spawn.Pipe(duplex=False)
        attackers = spawn.Process(
            target=besiege, args=(name, target, clients, options.seconds, sending_end), daemon=True
        )
        attackers.start()
        wait = asyncio.to_thread(receiving.poll, options.seconds + 2 * PATIENCE)
        if not await wait:
            attackers.kill()
            raise UserError(f"the clients of {name!r} did not come to an end")
        found = receiving.recv()
        attackers.join()
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    server: AbstractContextManager[str] = nullcontext(options.base_url)
    if not options.base_url:
        server = launch(load(ServerConfig, {"model": options.model, "port": 0}))
    with server as base_url:
        rows = siege(base_url, options)
    if options.output is not None:
        subject = f"--base-url {options.base_url}" if options.base_url else options.model
        command = f"python -m tools.siege {subject} --clients {options.clients} --seconds {options.seconds:g}"
        save(result("siege", rows, device=cpu_name(), command=command), options.output)


if __name__ == "__main__":
    main()
