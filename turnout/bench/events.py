"""Server-sent events of a POST over HTTP/1.1, as cheap as asyncio allows.

An event costs a client of general use more of a core than it costs the server that sends it, so that beyond
some thousand tokens a second it measures itself. Here bytes are parsed where they arrive, and no task wakes
up for an event unless it iterates over them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from turnout.errors import UserError

LIMIT = 1 << 20  # bytes of a line
FRESH = 1.0  # seconds; servers close a connection that was idle for longer, the shortest-tempered after 5
SHOWN = 500  # bytes of an answer that refuses

Take = Callable[[bytes], object]
Reading = Generator[None, None, bool]


class Connections:
    """Connections to one server. The next request takes one whose last answer was read to its end, as
    clients of general use do; a request of its own connection costs both ends some tenths of a millisecond.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None):
        """`base_url`: such as http://host:port/v1. headers: of each request."""
        self.base_url = base_url.rstrip("/")
        self._url = urlsplit(self.base_url)
        self._more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self._idle: list[tuple[float, Connection]] = []  # (since when, which)

    async def request(self, path: str, body: bytes, take: Take, *, keep: bool = True) -> None:
        """Call `take` with the data of each event of `path`'s answer to a JSON body, as they arrive; what it
        raises ends the request. keep: the connection, for the next one.

        Raises UserError for any status but 200, OSError if the connection fails or ends early.
        """
        connection, kept = await self._connection(), False
        head = (
            f"POST {self._url.path}/{path} HTTP/1.1\r\nHost: {self._url.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        close = "" if keep else "Connection: close\r\n"
        try:
            kept = await connection.ask(f"{head}{close}{self._more}\r\n".encode() + body, take) and keep
        except Refused as refused:
            raise UserError(f"{self.base_url}: HTTP {refused.status}: {refused.text}") from None
        finally:
            if kept:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.close()

    async def post(self, path: str, body: bytes, *, keep: bool = True) -> AsyncIterator[bytes]:
        """As `request`, whose events are iterated over."""
        events: asyncio.Queue[bytes | None] = asyncio.Queue()
        asking = asyncio.create_task(self.request(path, body, events.put_nowait, keep=keep))
        asking.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await asking
        finally:
            asking.cancel()

    async def _connection(self) -> Connection:
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < FRESH and not connection.ended:
                return connection
            connection.close()
        secure = self._url.scheme == "https"
        host, port = self._url.hostname or "", self._url.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, host, port, ssl=secure or None))[1]

    def close(self) -> None:
        """Close those that no request uses."""
        while self._idle:
            self._idle.pop()[1].close()


def post(
    base_url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> AsyncIterator[bytes]:
    """`Connections.post` over a connection of its own."""
    return Connections(base_url, headers).post(path, body, keep=False)


@dataclass
class Refused(Exception):
    """An answer of another status than 200, with the beginning of what it says."""

    status: int
    text: str


@dataclass
class Head:
    """Of an answer. length: bytes of the body; None: it comes in chunks, or up to the end of the connection.
    kept: whether the server keeps the connection."""

    status: int
    chunked: bool = False
    length: int | None = None
    kept: bool = True


class Connection(asyncio.Protocol):
    """Reads one answer after the other: a generator does, which yields where it needs more bytes.

    ended: nothing more will come.
    """

    def __init__(self) -> None:
        self.ended = False
        self._unread = b""
        self._reading: Reading | None = None
        self._answered: asyncio.Future[bool]

    async def ask(self, request: bytes, take: Take) -> bool:
        """Call `take` with the data of each event of the answer; whether the connection can be used again."""
        self._answered = asyncio.get_running_loop().create_future()
        self._reading = self._answer(take)
        self._transport.write(request)
        self._read_on()
        return await self._answered

    def close(self) -> None:
        self._reading = None
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._read_on()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self._read_on()

    def _read_on(self) -> None:
        """As far as what has come allows."""
        if self._reading is None or self._answered.done():
            return
        try:
            next(self._reading)
        except StopIteration as end:
            self._answered.set_result(end.value)
        except Exception as error:
            self._answered.set_exception(error)

    def _answer(self, take: Take) -> Reading:
        """Whether the connection is kept."""
        head = yield from self._head()
        if head.status != 200:
            said: list[bytes] = []
            yield from self._body(head, said.append)
            raise Refused(head.status, b"".join(said)[:SHOWN].decode(errors="replace"))
        line = b""

        def events(piece: bytes) -> None:
            nonlocal line
            *lines, line = (line + piece).split(b"\n")
            for found in lines:
                if found.startswith(b"data: "):
                    take(found[6:].rstrip())

        yield from self._body(head, events)
        return head.kept

    def _head(self) -> Generator[None, None, Head]:
        words = (yield from self._line()).split()
        if len(words) < 2 or not words[1].isdigit():
            raise ConnectionError("the server does not speak HTTP")
        found, closes = Head(int(words[1])), words[0] != b"HTTP/1.1"
        while line := (yield from self._line()).strip():
            name, _, value = line.lower().partition(b":")
            found.chunked |= name == b"transfer-encoding" and b"chunked" in value
            closes |= name == b"connection" and b"close" in value
            if name == b"content-length":
                found.length = int(value)
        found.kept = not closes and (found.chunked or found.length is not None)
        return found

    def _body(self, head: Head, take: Take) -> Generator[None, None, None]:
        """Its pieces as they come."""
        if head.chunked:
            yield from self._chunks(take)
        elif head.length is not None:
            take((yield from self._exactly(head.length)))
        else:
            while not self.ended:
                take(self._taken(len(self._unread)))
                yield
            take(self._unread)

    def _chunks(self, take: Take) -> Generator[None, None, None]:
        """Not by `_line` and `_exactly`, whose generators take a tenth of an event's time."""
        while True:
            start = self._unread.find(b"\n") + 1
            size = int(self._unread[:start].partition(b";")[0], 16) if start else 0
            if start and not size:
                break
            end = start + size
            if not start:
                yield from self._wait_for_line()
                continue
            if len(self._unread) < end + 2:  # a chunk ends in \r\n
                yield from self._wait()
                continue
            chunk, self._unread = self._unread[start:end], self._unread[end + 2 :]
            take(chunk)
        while (yield from self._line()).strip():  # the last chunk, and trailers
            pass

    def _line(self) -> Generator[None, None, bytes]:
        while (end := self._unread.find(b"\n")) < 0:
            yield from self._wait_for_line()
        return self._taken(end + 1)

    def _wait_for_line(self) -> Generator[None, None, None]:
        if len(self._unread) > LIMIT:
            raise ConnectionError(f"the server sent a line of more than {LIMIT} bytes")
        yield from self._wait()

    def _exactly(self, size: int) -> Generator[None, None, bytes]:
        while len(self._unread) < size:
            yield from self._wait()
        return self._taken(size)

    def _wait(self) -> Generator[None, None, None]:
        if self.ended:
            raise ConnectionError("the server hung up")
        yield

    def _taken(self, size: int) -> bytes:
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken
