"""Streams past h11: what arrives is byte for byte what h11 would have sent, however clients read."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from tests.server.processes import eventually
from turnout.server.api import guard
from turnout.server.api.chunks import ChunkWriter
from turnout.server.api.connection import EventStream
from turnout.server.api.guard import GuardedProtocol
from turnout.server.api.request_ids import RequestIds
from turnout.server.api.routes import Routes

PARTS = [f"data: {i} {'é' * (i * 37 % 300)}\n\n".encode() for i in range(200)]
MANY = [b"data: %06d %s\n\n" % (i, b"x" * 1000) for i in range(20_000)]


class Ended:
    """Streams whose `on_end` was called."""

    def __init__(self) -> None:
        self.count = 0


def application(ended: Ended) -> Starlette:
    routes = Routes()

    async def produce(parts: list[bytes], pause: float | None) -> AsyncIterator[bytes]:
        for i, part in enumerate(parts):
            if pause is not None and i % 10 == 0:
                await asyncio.sleep(pause)
            yield part

    def end() -> None:
        ended.count += 1

    @routes.get("/few")
    async def few(request: Request) -> EventStream:
        return EventStream(produce(PARTS, 0), on_end=end)

    @routes.get("/many", head=False)
    async def many(request: Request) -> EventStream:
        return EventStream(produce(MANY, None), on_end=end)

    @routes.get("/endless", head=False)
    async def endless(request: Request) -> EventStream:
        return EventStream(produce(PARTS * 10_000, 0.01), on_end=end)

    app = Starlette(routes=routes.routes)
    app.add_middleware(RequestIds)
    return app


@contextmanager
def served(protocol: type[H11Protocol], ended: Ended) -> Iterator[tuple[str, int]]:
    app = application(ended)
    config = uvicorn.Config(
        app, port=0, http=protocol, log_level="warning", lifespan="off", date_header=False
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[:2]
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bool]]:
    """Every chunk, and whether it went the short way."""
    taken: list[tuple[bytes, bool]] = []
    write = ChunkWriter.write

    def noted(self: ChunkWriter, data: bytes) -> bool:
        taken.append((data, write(self, data)))
        return taken[-1][1]

    monkeypatch.setattr(ChunkWriter, "write", noted)
    return taken


def short(written: list[tuple[bytes, bool]], parts: list[bytes]) -> list[bool]:
    """Of the streams of these parts."""
    of_stream = set(parts)
    return [went for data, went in written if data in of_stream]


def raw_answer(address: tuple[str, int], request: bytes) -> bytes:
    with closing(socket.create_connection(address, timeout=60)) as client:
        client.sendall(request)
        found = b""
        while piece := client.recv(1 << 16):
            found += piece
        return found


@pytest.mark.parametrize(
    ("method", "version", "goes"), [("GET", "1.1", True), ("GET", "1.0", False), ("HEAD", "1.1", None)]
)
def test_bytes_are_those_that_h11_would_have_sent(
    written: list[tuple[bytes, bool]], method: str, version: str, goes: bool | None
):
    request = f"{method} /few HTTP/{version}\r\nHost: a\r\nX-Request-Id: same\r\nConnection: close\r\n\r\n"
    answers = []
    for protocol in (H11Protocol, GuardedProtocol):
        with served(protocol, Ended()) as address:
            answers.append(raw_answer(address, request.encode()))
    assert answers[0] == answers[1]
    assert answers[0].startswith(b"HTTP/1.1 200 ")
    expected = [] if goes is None else [True] * len(PARTS) if goes else [True, *[False] * 199]
    assert short(written, PARTS) == expected


def test_a_connection_goes_on_after_a_stream(written: list[tuple[bytes, bool]]):
    with (
        served(GuardedProtocol, Ended()) as (host, port),
        httpx.Client(base_url=f"http://{host}:{port}", timeout=60) as client,
    ):
        for _ in range(3):
            answer = client.get("/few")
            assert answer.content == b"".join(PARTS)
        (connection,) = client._transport._pool.connections  # type: ignore[attr-defined]
        assert connection.is_idle()  # the one that served all three
    assert short(written, PARTS) == [True] * 3 * len(PARTS)


def test_a_client_that_reads_slowly_gets_everything_in_order(written: list[tuple[bytes, bool]]):
    """Its chunks wait where the server's do, and another client's do not wait for it."""
    with (
        served(GuardedProtocol, Ended()) as address,
        closing(socket.create_connection(address, timeout=60)) as slow,
    ):
        slow.sendall(b"GET /many HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert eventually(lambda: False in short(written, MANY))  # the system's buffers are full
        assert len(raw_answer(address, b"GET /few HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"))
        assert len(short(written, PARTS)) == len(PARTS)
        assert len(short(written, MANY)) < len(MANY)
        found = b""
        while piece := slow.recv(1 << 20):
            found += piece
    _, _, body = found.partition(b"\r\n\r\n")
    assert body == b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in MANY) + b"0\r\n\r\n"
    assert True in short(written, MANY)


def test_clients_that_do_not_read_or_hang_up_or_break_the_protocol_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(guard, "WRITE_SECONDS", 0.3)
    ended = Ended()
    with served(GuardedProtocol, ended) as address:
        with closing(socket.create_connection(address, timeout=60)) as deaf:
            deaf.sendall(b"GET /many HTTP/1.1\r\nHost: a\r\n\r\n")
            assert eventually(lambda: ended.count == 1)
        with closing(socket.create_connection(address, timeout=60)) as leaving:
            leaving.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
            leaving.recv(1 << 16)
        assert eventually(lambda: ended.count == 2)
        with closing(socket.create_connection(address, timeout=60)) as wrong:
            wrong.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            wrong.recv(1 << 16)
            wrong.sendall(b"no size of a chunk\r\n")
            while wrong.recv(1 << 16):
                pass
        assert eventually(lambda: ended.count == 3)
