"""Which connection a request takes, seen from the standard library's HTTP server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from turnout.bench import events
from turnout.bench.events import Connections, post
from turnout.errors import UserError


class Counting(BaseHTTPRequestHandler):
    """Answers with two events, in chunks with a trailer or of a length that it says; notes the port of each
    request's connection, which it keeps open. To "held" the second event comes once `released` is set."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.ports.append(self.client_address[1])
        self.send_response(404 if "missing" in self.path else 200)
        if self.path == "/v1/close":
            self.send_header("Connection", "close")
        if "sized" in self.path:
            self.send_header("Content-Length", "18")
            self.end_headers()
            self.wfile.write(b"data: 1\n\ndata: 2\n\n")
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in b"data: 1\n\n", b"data: 2\n\n":
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            if self.path == "/v1/held":
                self.server.released.wait()
        self.wfile.write(b"0\r\nX-Trailer: 1\r\n\r\n")
        if self.path == "/v1/gone":  # without having said so
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def counting():
    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        server.ports, server.daemon_threads, server.released = [], True, threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def connections_of(server: ThreadingHTTPServer, use: Callable[[Connections], Coroutine]) -> list[int]:
    """The connections of the server's requests, numbered as they came."""

    async def run() -> None:
        connections = Connections(f"http://127.0.0.1:{server.server_port}/v1")
        async with asyncio.timeout(60):  # the server would wait for the next request for ever
            await use(connections)
        connections.close()

    asyncio.run(run())
    seen: dict[int, int] = {}
    return [seen.setdefault(port, len(seen)) for port in server.ports]


async def read(stream: AsyncIterator[bytes]) -> None:
    assert [event async for event in stream] == [b"1", b"2"]


def test_the_next_request_takes_a_connection_that_is_free(counting):
    async def use(connections: Connections) -> None:
        await read(connections.post("a", b"{}"))
        await read(connections.post("a", b"{}"))
        first = connections.post("held", b"{}")
        await anext(first)  # its connection is at work
        await read(connections.post("a", b"{}"))
        counting.released.set()
        assert [event async for event in first] == [b"2"]
        await asyncio.gather(read(connections.post("a", b"{}")), read(connections.post("a", b"{}")))

    *before, one, another = connections_of(counting, use)
    assert before == [0, 0, 0, 1]
    assert {one, another} == {0, 1}


def test_an_answer_of_a_known_length_ends_there(counting):
    async def use(connections: Connections) -> None:
        await read(connections.post("sized", b"{}"))
        await read(connections.post("sized", b"{}"))
        with pytest.raises(UserError, match="HTTP 404: data: 1"):
            await read(connections.post("sized/missing", b"{}"))

    assert connections_of(counting, use) == [0, 0, 0]


def events_of(answer: bytes, *, pieces: int = 1000) -> list[bytes]:
    """What a request gets of a server that sends `answer`, so many bytes at a time, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        for at in range(0, len(answer), pieces):
            writer.write(answer[at : at + pieces])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def run() -> list[bytes]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            root = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            return [event async for event in post(root, "a", b"{}")]

    return asyncio.run(run())


def test_what_is_no_http_is_called_so():
    with pytest.raises(ConnectionError, match="the server does not speak HTTP"):
        events_of(b"\r\n")


async def left_early(connections: Connections) -> None:
    async with aclosing(connections.post("a", b"{}")) as stream:
        await anext(stream)


async def refused(connections: Connections) -> None:
    with pytest.raises(UserError, match="HTTP 404: data: 1"):
        await read(connections.post("missing", b"{}"))


async def said_to_close(connections: Connections) -> None:
    await read(connections.post("close", b"{}"))


async def closed_unasked(connections: Connections) -> None:
    await read(connections.post("gone", b"{}"))
    [(_, connection)] = connections._idle
    while not connection.ended:
        await asyncio.sleep(0.01)


async def of_its_own(connections: Connections) -> None:
    await read(post(connections.base_url, "a", b"{}"))


@pytest.mark.parametrize("before", [left_early, refused, said_to_close, closed_unasked, of_its_own])
def test_a_connection_is_not_kept(before, counting):
    async def use(connections: Connections) -> None:
        await before(connections)
        await read(connections.post("a", b"{}"))

    assert connections_of(counting, use) == [0, 1]


def test_a_connection_is_not_kept_for_long(counting, monkeypatch):
    monkeypatch.setattr(events, "FRESH", 0.01)

    async def use(connections: Connections) -> None:
        await read(connections.post("a", b"{}"))
        time.sleep(0.02)  # so that nothing else happens meanwhile
        await read(connections.post("a", b"{}"))

    assert connections_of(counting, use) == [0, 1]


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_bytes_arrive(cut):
    """Chunks that hold parts of events and several, of which pieces of `cut` bytes arrive at a time."""
    body = b"data: one\n\ndata: \xc3\xa4\r\n\r\n: a comment\n\ndata: three\n\ndata: [DONE]\n\n"
    chunks = [body[:9], body[9:40], body[40:]]
    sent = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent += b"".join(b"%x;x=y\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    assert events_of(sent, pieces=cut) == [b"one", "ä".encode(), b"three", b"[DONE]"]


def test_an_answer_of_no_length_ends_with_its_connection():
    assert events_of(b"HTTP/1.0 200 OK\r\n\r\ndata: 1\n\ndata: 2\n", pieces=5) == [b"1", b"2"]


def test_what_an_event_makes_its_reader_raise_ends_the_request(counting):
    def refuse(data: bytes) -> None:
        raise ValueError(f"no {data.decode()}")

    async def use(connections: Connections) -> None:
        with pytest.raises(ValueError, match="no 1"):
            await connections.request("a", b"{}", refuse)
        await read(connections.post("a", b"{}"))

    assert connections_of(counting, use) == [0, 1]


@pytest.mark.parametrize("after", [b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata"])
def test_a_server_that_hangs_up_is_said_to(after):
    with pytest.raises(ConnectionError, match="the server hung up"):
        events_of(after)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_line_without_an_end_is_not_kept(chunked, monkeypatch):
    monkeypatch.setattr(events, "LIMIT", 100)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" if chunked else b""
    with pytest.raises(ConnectionError, match="a line of more than 100 bytes"):
        events_of(head + b"1" * 1000, pieces=60)
