"""Messages of a worker's engine, where the order of things matters."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turnout.engine.messages import AddRequest, RequestOutput
from turnout.engine.sampling_params import SamplingParams
from turnout.server.http_workers.messages import (
    Channel,
    Delivered,
    Ended,
    Failure,
    Reserve,
    Reserved,
    Unreserve,
    head_decoder,
)
from turnout.server.http_workers.remote_engine import RemoteEngine
from turnout.server.supervise.ledger import EngineFailed


def test_places_for_a_client_that_has_left_are_given_back():
    async def scenario() -> None:
        sent: list[Any] = []
        engine = RemoteEngine(sent.append)
        left, full, stays = (asyncio.ensure_future(engine.reserve(n, 10)) for n in (3, 8, 2))
        await asyncio.sleep(0)
        assert sent == [Reserve(3, 10), Reserve(8, 10), Reserve(2, 10)]
        left.cancel()
        await asyncio.sleep(0)
        for present in (None, 3, None):  # answers come in order
            engine.reserved(Reserved(present))
        assert sent[3:] == [Unreserve(3)]
        assert [await full, await stays] == [3, None]

    asyncio.run(scenario())


def test_outputs_go_to_their_request_until_it_has_ended():
    sent: list[Any] = []
    engine = RemoteEngine(sent.append)
    found: dict[str, list[RequestOutput | EngineFailed]] = {id: [] for id in "abc"}
    for id, outputs in found.items():
        engine.submit(AddRequest(id=id, prompt_ids=[1], sampling=SamplingParams()), outputs.append)
    engine.deliver(Delivered([RequestOutput(id="a", token_ids=[5]), RequestOutput(id="b", token_ids=[6])]))
    engine.deliver(Delivered([RequestOutput(id="a", token_ids=[7], finish_reason="length")]))
    engine.abort(["a", "b", "unknown"])
    engine.deliver(Delivered([RequestOutput(id="b", token_ids=[8])]))  # was on its way
    engine.end(Ended("c", Failure("rank 0 was killed", spoken=True)))
    assert [output.token_ids for output in found["a"]] == [[5], [7]]
    assert [output.token_ids for output in found["b"]] == [[6]]
    (failure,) = found["c"]
    assert (str(failure), failure.spoken) == ("rank 0 was killed", True)
    assert sent[-1].ids == ["b"]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_channel_takes_what_comes_in_pieces(size: int):
    """Any cut of the bytes gives the same messages, in order, and those of a turn come as one list."""

    class Wire(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.written: list[bytes] = []

        def write(self, data: bytes) -> None:
            self.written.append(data)

    async def scenario() -> None:
        wire, found = Wire(), list[Any]()
        sender = Channel(head_decoder, found.append, lambda: None, lambda: [Unreserve(9)])
        sender.connection_made(wire)
        for turn in range(3):
            sender.send(Reserve(turn, 10))
            sender.send(Unreserve(turn))
            await asyncio.sleep(0)
        assert len(wire.written) == 3
        receiver = Channel(head_decoder, found.append, lambda: None)
        everything = b"".join(wire.written)
        for at in range(0, len(everything), size):
            receiver.data_received(everything[at : at + size])
        wanted = [[Reserve(turn, 10), Unreserve(turn), Unreserve(9)] for turn in range(3)]
        assert found == [message for messages in wanted for message in messages]

    asyncio.run(scenario())
