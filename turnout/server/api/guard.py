"""HTTP connections that give slow clients a limited time: uvicorn's protocol, which waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from turnout.server.api.errors import ApiError

REQUEST_SECONDS = 10  # for a request's head, from its first byte; and for a body after its answer
WRITE_SECONDS = 60  # without reading what was sent, until a client is cut off
READ_BYTES = 64 * 2**10  # at once; asyncio's default is four times as much, held for every connection


class GuardedProtocol(H11Protocol):
    """Answers 408 to a client that does not complete its request's head, and closes.

    One that reads no answer is disconnected. Bodies have their own limit, in `connection.read_body`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._patience: asyncio.TimerHandle | None = None  # with the request
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
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
        if self.cycle is not None and not self.cycle.response_complete:
            self._patience = _stopped(self._patience)
        elif self._patience is None and not self.transport.is_closing():
            self._patience = self.loop.call_later(REQUEST_SECONDS, self._out_of_patience)

    def _out_of_patience(self) -> None:
        if self.transport.is_closing():
            return
        began = self.conn.trailing_data[0] or self.conn.their_state is not h11.IDLE
        if began and self.conn.our_state is h11.IDLE:  # a connection that was only opened is only closed
            self._refuse(ApiError(408, f"the request's head did not arrive within {REQUEST_SECONDS} s"))
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        content = msgspec.json.encode(error.body())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=b"Request Timeout"),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")


def _stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    if timer is not None:
        timer.cancel()
    return None
