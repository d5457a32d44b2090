"""HTTP connections that give clients a limited time and a limited number of chunks: uvicorn's protocol, which
waits for ever and parses whatever comes at once."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from turnout.server.api.chunks import CHUNKS, ChunkWriter
from turnout.server.api.errors import ApiError

REQUEST_SECONDS = 10  # for a request's head, from its first byte; and for a body after its answer
WRITE_SECONDS = 60  # without reading what was sent, until a client is cut off
READ_BYTES = 64 * 2**10  # at once; asyncio's default is four times as much, held for every connection
FREE_CHUNKS = 128  # of one body, of any size
CHUNK_BYTES = 256  # that a body needs for each further one; to parse one takes about 10 us
# A client's fault is told to the client: logged too, a flood of them would fill the disk.
log = logging.getLogger("turnout.server.connection")
log.setLevel(logging.ERROR)


class BoundedConnection(h11.Connection):
    """Refuses bodies that come in many tiny chunks: 64 KiB of one-byte chunks take 100 ms to parse."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self.fault = ""  # what the client did wrong
        self._chunks = self._size = 0  # of the present body

    def next_event(self) -> Any:
        """See h11. Raises RemoteProtocolError also for too many chunks."""
        try:
            event = super().next_event()
            self._count(event)
            return event
        except h11.RemoteProtocolError as error:
            self.fault = str(error)
            raise

    def _count(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            self._chunks = self._size = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._size += len(event.data)
            if self._chunks > FREE_CHUNKS + self._size // CHUNK_BYTES:
                raise h11.RemoteProtocolError(
                    f"the body comes in too many chunks: {FREE_CHUNKS} are allowed, and one more for every "
                    f"{CHUNK_BYTES} bytes; send larger ones, or the whole body with Content-Length"
                )


class GuardedProtocol(H11Protocol):
    """Answers 408 to a client that does not complete its request's head, 400 to one that does not speak HTTP
    or sends too many chunks, and closes.

    One that reads no answer is disconnected. Bodies have their own limits, in `connection.read_body`.
    """

    conn: BoundedConnection

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._patience: asyncio.TimerHandle | None = None  # with the request
        self._writing: asyncio.TimerHandle | None = None
        self._refused = False
        self.logger = log
        self.conn = BoundedConnection()
        self.app = self._with_chunks

    async def _with_chunks(self, scope: Any, receive: Any, send: Any) -> None:
        """The application, told of a ChunkWriter."""
        if scope["method"] != "HEAD":
            scope.setdefault("extensions", {})[CHUNKS] = ChunkWriter(self.cycle).write
        await self.config.loaded_app(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if hasattr(transport, "max_size"):  # asyncio's; uvloop has one buffer for all connections
            transport.max_size = READ_BYTES
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._watch()  # else the time-out of idle connections runs

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._patience = _stopped(self._patience)
        self._writing = _stopped(self._writing)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing = _stopped(self._writing)

    def _watch(self) -> None:
        """Let the time run while no request is being answered, from the moment it began: more data does not
        prolong it."""
        if self._refused:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._patience = _stopped(self._patience)
        elif self._patience is None and not self.transport.is_closing():
            self._patience = self.loop.call_later(REQUEST_SECONDS, self._out_of_patience)

    def _out_of_patience(self) -> None:
        if self.transport.is_closing():
            return
        began = self.conn.trailing_data[0] or self.conn.their_state is not h11.IDLE
        if began and self.conn.our_state is h11.IDLE:
            self._refuse(ApiError(408, f"the request's head did not arrive within {REQUEST_SECONDS} s"))
        else:  # a connection that was only opened is only closed
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong with the request, and read no further."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # nothing more comes, nor is anything sent, for those who wait
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(ApiError(400, f"the request cannot be read: {self.conn.fault}"))
        else:  # it has its answer already
            self._refused = True
            self._patience = _stopped(self._patience)
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer, and throw away what the client still sends: else it sees a reset instead of the answer."""
        self._refused = True
        self._patience = _stopped(self._patience)
        self._answer(error)
        self.transport.write_eof()
        self.flow.resume_reading()
        self._patience = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

    def _answer(self, error: ApiError) -> None:
        content = msgspec.json.encode(error.body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
        ]
        reason = HTTPStatus(error.status).phrase.encode()
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=reason),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
