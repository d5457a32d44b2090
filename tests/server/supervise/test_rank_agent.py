"""What a rank does that finds no head, or none that answers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from turnout.errors import UserError
from turnout.server.supervise import rank_protocol
from turnout.server.supervise.rank_agent import hello, serve_heads
from turnout.server.supervise.secret import Channel

SECRET = b"pears and plums, and a few more plums"


def refusal(address: str) -> str:
    """What a rank says that looks for a head at `address` for a second."""
    agents = serve_heads(address, SECRET, [hello()], own={}, patience=1.0)
    with pytest.raises(UserError) as caught:
        asyncio.run(asyncio.wait_for(agents, 60))
    return str(caught.value)


async def says_nothing_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await Channel.open(reader, writer, rank_protocol.to_head, SECRET, is_head=True)
    await reader.read()


@contextmanager
def that_takes_no_connection() -> Iterator[str]:
    """The address of one whose queue is full: the system drops what comes, as a firewall may."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect(listening.getsockname())
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_head_that_takes_no_connection(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """It is not waited for longer than others, and the log says so before the rank ends."""
    monkeypatch.setattr(rank_protocol, "SILENT_SECONDS", 0.2)
    with that_takes_no_connection() as address, caplog.at_level(logging.INFO, "turnout.server"):
        assert f"no head at {address} within 1 s: it does not answer; start" in refusal(address)
        assert caplog.messages.count(f"waiting for a head at {address}: it does not answer") == 1


def test_a_head_that_stops_after_its_first_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_protocol, "SILENT_SECONDS", 0.2)

    async def main() -> None:
        async with await asyncio.start_server(says_nothing_more, "127.0.0.1", 0) as server:
            address = "{}:{}".format(*server.sockets[0].getsockname())
            with pytest.raises(UserError, match=f"no head at {address} within 1 s: it does not answer"):
                await serve_heads(address, SECRET, [hello()], own={}, patience=1.0)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_name_that_nobody_knows_yet_is_tried_again():
    """Names of pods are known some time after the pods have started."""
    assert "no head at nowhere.invalid:5000 within 1 s: " in refusal("nowhere.invalid:5000")
