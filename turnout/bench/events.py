"""Server-sent events of a POST over HTTP/1.1, as cheap as asyncio allows.

An event costs a client of general use more of a core than it costs the server that sends it, so that beyond
some thousand tokens a second it measures itself. This one takes 8 us of an event where httpx takes 32, both
of many events at once, and nothing for what httpx does around each read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from turnout.errors import UserError

LIMIT = 1 << 20  # bytes of a line
FRESH = 1.0  # seconds; servers close a connection that was idle for longer, the shortest-tempered after 5

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


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

    async def post(self, path: str, body: bytes, *, keep: bool = True) -> AsyncIterator[bytes]:
        """The data of each event of `path`'s answer to a JSON body. keep: the connection, for the next one.

        Raises UserError for any status but 200, OSError if the connection fails or ends early.
        """
        reader, writer = connection = await self._connection()
        whole = False
        try:
            head = (
                f"POST {self._url.path}/{path} HTTP/1.1\r\nHost: {self._url.netloc}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            )
            close = "" if keep else "Connection: close\r\n"
            writer.write(f"{head}{close}{self._more}\r\n".encode() + body)
            answer = await _head(reader)
            pieces = answer.body(reader)
            if answer.status != 200:
                text = b"".join([piece async for piece in pieces]).decode(errors="replace")
                raise UserError(f"{self.base_url}: HTTP {answer.status}: {text[:500]}")
            line = b""
            async for piece in pieces:
                *lines, line = (line + piece).split(b"\n")
                for found in lines:
                    if found.startswith(b"data: "):
                        yield found[6:].rstrip()
            whole = answer.kept and keep
        except asyncio.IncompleteReadError:
            raise ConnectionError("the server hung up") from None
        finally:
            if whole:
                self._idle.append((time.monotonic(), connection))
            else:
                writer.close()

    async def _connection(self) -> Connection:
        while self._idle:
            since, (reader, writer) = self._idle.pop()
            if time.monotonic() - since < FRESH and not reader.at_eof():
                return reader, writer
            writer.close()
        secure = self._url.scheme == "https"
        port = self._url.port or (443 if secure else 80)
        return await asyncio.open_connection(self._url.hostname, port, ssl=secure or None, limit=LIMIT)

    def close(self) -> None:
        """Close those that no request uses."""
        while self._idle:
            self._idle.pop()[1][1].close()


def post(
    base_url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> AsyncIterator[bytes]:
    """`Connections.post` over a connection of its own."""
    return Connections(base_url, headers).post(path, body, keep=False)


@dataclass
class Answer:
    """What the head of one says. length: bytes of the body; None: it comes in chunks, or up to the end of the
    connection. kept: whether the server keeps the connection."""

    status: int
    chunked: bool = False
    length: int | None = None
    kept: bool = True

    def body(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """Its pieces as they come."""
        if self.chunked:
            return _chunks(reader)
        return _rest(reader) if self.length is None else _exactly(reader, self.length)


async def _head(reader: asyncio.StreamReader) -> Answer:
    words = (await _line(reader)).split()
    if len(words) < 2 or not words[1].isdigit():
        raise ConnectionError("the server does not speak HTTP")
    found, closes = Answer(int(words[1])), words[0] != b"HTTP/1.1"
    while line := (await _line(reader)).strip():
        name, _, value = line.lower().partition(b":")
        found.chunked |= name == b"transfer-encoding" and b"chunked" in value
        closes |= name == b"connection" and b"close" in value
        if name == b"content-length":
            found.length = int(value)
    found.kept = not closes and (found.chunked or found.length is not None)
    return found


async def _line(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\n")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await _line(reader)).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    while (await _line(reader)).strip():  # trailers
        pass


async def _exactly(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    yield await reader.readexactly(length)


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece
