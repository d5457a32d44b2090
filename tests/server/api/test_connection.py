"""Streams of events on a connection that the test makes up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.types import Message

from turnout.server.api import connection
from turnout.server.api.anthropic.answer import PING
from turnout.server.api.connection import COMMENT, EventStream


class VirtualTime(asyncio.SelectorEventLoop):
    """Time passes only when every task waits for it, and then at once: how loaded the machine is changes
    nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def pass_time(timeout: float | None) -> Any:
            self._now += timeout or 0.0
            return select(None if timeout is None else 0)

        self._selector.select = pass_time

    def time(self) -> float:
        return self._now


def send_all(parts: list[tuple[float, bytes]], slow: float = 0.0, waiting: bytes = COMMENT) -> list[bytes]:
    """What a client gets of parts, each of which comes after so many seconds; it takes `slow` for each."""
    sent: list[bytes] = []
    ended: list[bool] = []

    async def produce() -> AsyncIterator[bytes]:
        for seconds, part in parts:
            await asyncio.sleep(seconds)
            yield part

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(slow)
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    stream = EventStream(produce(), on_end=lambda: ended.append(True), waiting=waiting)
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        runner.run(stream({"type": "http"}, receive, send))
    assert ended == [True]
    return sent


@pytest.mark.parametrize("waiting", [COMMENT, PING])
def test_a_silent_stream_is_kept_open(monkeypatch: pytest.MonkeyPatch, waiting: bytes):
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.1)
    sent = send_all([(0.35, b"first"), (0, b"second"), (0.35, b"last")], waiting=waiting)
    assert [part for part in sent if part != waiting] == [b"first", b"second", b"last", b""]
    first = sent.index(b"first")
    assert set(sent[:first]) == {waiting}
    assert sent[first + 1] == b"second"
    assert waiting in sent[first + 2 :]
    assert sent[-2:] == [b"last", b""]


def test_a_stream_that_speaks_or_is_not_read_needs_no_comments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.2)
    assert COMMENT not in send_all([(0.01, b"part")] * 40)
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.02)
    assert COMMENT not in send_all([(0, b"part")] * 3, slow=0.1)
