"""What the head and a worker tell each other, in lists, over a socket that the worker was born with."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from turnout.engine.messages import Abort, AddRequest, Ready, RequestOutput
from turnout.server.metrics import Observed
from turnout.server.supervise.ledger import EngineFailed

USER_ERROR = 2  # exit code of a worker that has said what the user can fix
SIZE = struct.Struct("<Q")  # of the list that follows


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An EngineFailed."""

    message: str
    user_error: bool = False
    spoken: bool = False

    @classmethod
    def of(cls, failure: EngineFailed) -> Failure:
        return cls(str(failure), failure.user_error, failure.spoken)

    def raised(self) -> EngineFailed:
        return EngineFailed(self.message, user_error=self.user_error, spoken=self.spoken)


class EngineState(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """When something of it has changed."""

    accepting: bool
    draining: bool
    failure: Failure | None
    last_failure: Failure | None


class Delivered(msgspec.Struct, tag=True, frozen=True):
    """What has come for requests of this worker."""

    outputs: list[RequestOutput]


class Reserved(msgspec.Struct, tag=True, frozen=True):
    """The answer to the first Reserve that has none; `present` as Engine.reserve returns it."""

    present: int | None


class Ended(msgspec.Struct, tag=True, frozen=True):
    """A request will get nothing more, for that reason."""

    id: str
    failure: Failure


class CutOff(msgspec.Struct, tag=True, frozen=True):
    """End all running requests with an error."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Close all connections and leave."""


class Reserve(msgspec.Struct, tag=True, frozen=True):
    """See Engine.reserve. The head answers in order."""

    count: int
    room: int


class Unreserve(msgspec.Struct, tag=True, frozen=True):
    """See Engine.unreserve."""

    count: int


class Opened(msgspec.Struct, tag=True, frozen=True):
    """This worker could serve now, if the engine does."""


class Report(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """active: requests that are being answered. observed: since the last report. draining: whether that is
    known here, so that no further request begins."""

    active: int
    draining: bool
    observed: Observed | None


ToWorker = Ready | EngineState | Reserved | Delivered | Ended | CutOff | Stop
ToHead = Reserve | Unreserve | AddRequest | Abort | Opened | Report

encoder = msgspec.msgpack.Encoder()
worker_decoder: msgspec.msgpack.Decoder[list[ToWorker]] = msgspec.msgpack.Decoder(list[ToWorker])
head_decoder: msgspec.msgpack.Decoder[list[ToHead]] = msgspec.msgpack.Decoder(list[ToHead])


class Channel(asyncio.Protocol):
    """One end of the socket: what is sent within a turn of the event loop goes together."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        receive: Callable[[Any], None],
        on_end: Callable[[], None],
        collect: Callable[[], list[Any]] = list,
    ):
        """receive: called for each message that comes. on_end: when the other end is gone. collect: what to
        add to what is sent, asked just before."""
        self._decoder, self._receive, self._on_end, self._collect = decoder, receive, on_end, collect
        self._transport: asyncio.Transport | None = None
        self._unsent: list[Any] = []
        self._due = False
        self._come = bytearray()

    def send(self, *messages: Any) -> None:
        """Send these, and what `collect` gives, when this turn is over; nothing where the other is gone."""
        self._unsent += messages
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._come += data
        while len(self._come) >= SIZE.size:
            end = SIZE.size + SIZE.unpack_from(self._come)[0]
            if len(self._come) < end:
                return
            with memoryview(self._come) as come:
                messages = self._decoder.decode(come[SIZE.size : end])
            del self._come[:end]
            for message in messages:
                self._receive(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()

    def _flush(self) -> None:
        self._due = False
        unsent, self._unsent = self._unsent + self._collect(), []
        if self._transport is not None and unsent:
            content = encoder.encode(unsent)
            self._transport.write(SIZE.pack(len(content)) + content)
