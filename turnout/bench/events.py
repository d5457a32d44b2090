"""Server-sent events of a POST over HTTP/1.1, as cheap as asyncio allows.

An event costs a client of general use more of a core than it costs the server that sends it, so that beyond
some thousand tokens a second it measures itself. This one takes 8 us of an event where httpx takes 32, both
of many events at once, and nothing for what httpx does around each read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

from turnout.errors import UserError

LIMIT = 1 << 20  # bytes of a line


async def post(
    base_url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> AsyncIterator[bytes]:
    """The data of each event of `base_url`/`path`'s answer to a JSON body.

    Raises UserError for any status but 200, OSError if the connection fails or ends early.
    """
    url = urlsplit(f"{base_url.rstrip('/')}/{path}")
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure or None, limit=LIMIT)
    try:
        head = (
            f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n"
        )
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        writer.write(f"{head}{more}\r\n".encode() + body)
        status, chunked = await _head(reader)
        pieces = _chunks(reader) if chunked else _rest(reader)
        if status != 200:
            text = b"".join([piece async for piece in pieces]).decode(errors="replace")
            raise UserError(f"{base_url}: HTTP {status}: {text[:500]}")
        line = b""
        async for piece in pieces:
            *lines, line = (line + piece).split(b"\n")
            for whole in lines:
                if whole.startswith(b"data: "):
                    yield whole[6:].rstrip()
    except asyncio.IncompleteReadError:
        raise ConnectionError("the server hung up") from None
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """(status, whether the body comes in chunks rather than up to the end of the connection)."""
    words = (await _line(reader)).split()
    if len(words) < 2 or not words[1].isdigit():
        raise ConnectionError("the server does not speak HTTP")
    chunked = False
    while line := (await _line(reader)).strip():
        name, _, value = line.lower().partition(b":")
        chunked |= name == b"transfer-encoding" and b"chunked" in value
    return int(words[1]), chunked


async def _line(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\n")


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await _line(reader)).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece
