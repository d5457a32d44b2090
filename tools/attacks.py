"""The hostile clients of `tools.siege`, which runs each kind in a process of its own:

    python -m tools.attacks NAME HOST PORT MODEL CLIENTS SECONDS

Prints how the requests ended, and after how many seconds, as one line of JSON. Imports little, to start
quickly.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

BODY = 4 * 2**20  # bytes, the server's default limit
PATIENCE = 60.0  # seconds for one answer


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


def rounds(until: float) -> Iterator[None]:
    """One, and more until time.perf_counter() reaches `until`."""
    yield
    while time.perf_counter() < until:
        yield


def sending(path: str, body: Callable[[], bytes]) -> Attack:
    """One body again and again, on a new connection each time."""

    async def attack(target: Target, found: Found, until: float) -> None:
        content = body()
        for _ in rounds(until):
            start = time.perf_counter()
            async with connected(target) as (reader, writer):
                writer.write(head(path, len(content), "Connection: close"))
                writer.write(content)
                found.add(await status(reader), start)

    return attack


async def chunking(target: Target, found: Found, until: float) -> None:
    """A body in chunks of one byte."""
    content = b"POST /v1/completions HTTP/1.1\r\nHost: siege\r\nTransfer-Encoding: chunked\r\n\r\n"
    content += b"1\r\na\r\n" * 2**16
    for _ in rounds(until):
        start = time.perf_counter()
        async with connected(target) as (reader, writer):
            writer.write(content)
            found.add(await status(reader), start)


def trickling(first: bytes, piece: bytes) -> Attack:
    """A piece each half second, until the server has had enough."""

    async def attack(target: Target, found: Found, until: float) -> None:
        for _ in rounds(until):
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
    for _ in rounds(until):
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
        for _ in rounds(until):
            start = time.perf_counter()
            async with connected(target) as (reader, writer):
                writer.write(head("/v1/completions", len(content)) + content)
                found.add(await status(reader), start)

    await asyncio.gather(*(one() for _ in range(50)))


PARTIAL = head("/v1/completions", BODY) + b'{"prompt":"'
ATTACKS: dict[str, Attack] = {
    "messages": sending("/v1/chat/completions", numbers),
    "texts": sending("/v1/completions", text),
    "chunks": chunking,
    "slow heads": trickling(b"POST /v1/completions HTTP/1.1\r\nHost: siege\r\n", b"X-Slow: a\r\n"),
    "slow bodies": trickling(PARTIAL, b"a"),
    "slow readers": not_reading,
    "vanishing": vanishing,
    "flood": flooding,
}
CLIENTS = {"slow heads": 50, "slow bodies": 50}  # where sockets cost the clients nothing


def besiege(name: str, target: Target, clients: int, seconds: float) -> Found:
    """Run one attack in this process."""
    found = Found()

    async def client(until: float) -> None:
        for _ in rounds(until):
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
    return found


def main() -> None:
    name, host, port, model, clients, seconds = sys.argv[1:]
    found = besiege(name, Target(host, int(port), model), int(clients), float(seconds))
    print(json.dumps(vars(found)))


if __name__ == "__main__":
    main()
