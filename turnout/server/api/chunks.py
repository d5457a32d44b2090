"""A short way out for the chunks of a streamed body."""

from __future__ import annotations

from collections.abc import Callable

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

CHUNKS = "turnout.chunks"  # in a scope's extensions, where there is a short way: `ChunkWriter.write`


class ChunkWriter:
    """The body of one response, chunk by chunk past the layers that have nothing to do with it: middlewares
    that look at heads only, and h11, whose state a chunk between the first and the last does not change."""

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle
        self._is_chunked: bool | None = None  # once a chunk went through h11

    def write(self, data: bytes) -> bool:
        """Send `data`, which is not empty, at once; False, and nothing done, where only ASGI's `send` can:
        it waits for slow clients, and knows other framings of HTTP."""
        cycle = self._cycle
        if (
            self._is_chunked is False
            or not cycle.response_started
            or cycle.response_complete
            or cycle.disconnected
            or cycle.flow.write_paused
        ):
            return False
        framed: bytes | None = b"%x\r\n%b\r\n" % (len(data), data)
        if self._is_chunked is None:
            own, framed = framed, cycle.conn.send(h11.Data(data=data))
            self._is_chunked = own == framed
        cycle.transport.write(framed or b"")
        return True


def short_way(scope: Scope) -> Callable[[bytes], bool]:
    """`ChunkWriter.write` of the request; where the server has none, what always says False."""
    return scope.get("extensions", {}).get(CHUNKS, _none)


def _none(data: bytes) -> bool:
    return False
