"""What a group makes of messages that get lost between it and a rank, which is played over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from turnout.config import ServerConfig
from turnout.engine.messages import (
    AddRequest,
    Command,
    EngineStats,
    Event,
    Outputs,
    Ready,
    RequestOutput,
    Wake,
    command_decoder,
    encoder,
)
from turnout.engine.sampling_params import SamplingParams
from turnout.parallel.health import Reading
from turnout.server.supervise import engine_group
from turnout.server.supervise.engine_group import EngineGroup
from turnout.server.supervise.ledger import EngineFailed
from turnout.server.supervise.local_ranks import OnExit, Rendezvous

REQUEST = AddRequest(id="a", prompt_ids=[1], sampling=SamplingParams(max_tokens=9))


class Played:
    """What all `Host`s here have in common: nothing is known of their ranks."""

    where = "here"
    _context: zmq.Context

    def kill(self) -> None:
        self._context.destroy(linger=0)

    async def gone(self) -> None:
        pass

    def readings(self) -> dict[int, Reading]:
        return {}

    def pid(self, rank: int) -> int | None:
        return None


class Rank(Played):
    """A `Host` of one rank, which says what the test makes it say and goes on whatever happens."""

    ranks = range(1)

    async def start(self, rendezvous: Rendezvous, on_exit: OnExit) -> None:
        self._context = zmq.Context()
        self.commands, self._events = self._context.socket(zmq.DEALER), self._context.socket(zmq.PUSH)
        self.commands.identity = rendezvous.identity(0).encode()
        self.commands.connect(rendezvous.commands)
        self._events.connect(rendezvous.events)
        self.output(0)
        self.say(Ready(info={"config": {"max_running_requests": 4}}, max_context=9, vocab_size=9))

    def say(self, event: Event) -> None:
        self._events.send(encoder.encode(event))

    def output(self, number: int, *token_ids: int) -> None:
        """Message `number`, which gives the request these tokens."""
        outputs = [RequestOutput(id="a", token_ids=list(token_ids))] if token_ids else []
        self.say(Outputs(number=number, outputs=outputs, stats=EngineStats()))


def failure(folder: Path, then: Callable[[Rank, EngineGroup], None]) -> tuple[str, list[int]]:
    """Why a group fails that has a request when `then` happens, and the tokens of that."""
    tokens: list[int] = []

    async def life() -> None:
        rank, ready = Rank(), asyncio.Event()
        addresses = {name: f"ipc://{folder}/{name}" for name in ("commands", "events")}
        group = EngineGroup(ServerConfig(), [rank], Rendezvous(number=1, init_method="", **addresses))
        running = asyncio.create_task(group.run(ready.set))
        await ready.wait()
        group.submit(REQUEST, lambda output: tokens.extend(output.token_ids))
        then(rank, group)
        await running

    with pytest.raises(EngineFailed) as failed:
        asyncio.run(asyncio.wait_for(life(), 60))
    return str(failed.value), tokens


def test_nothing_is_delivered_after_a_message_that_was_lost(tmp_path: Path):
    def lose_one(rank: Rank, group: EngineGroup) -> None:
        for number, token in ((1, 5), (2, 6), (4, 8), (5, 9)):
            rank.output(number, token)

    why, tokens = failure(tmp_path, lose_one)
    assert "message 3 of the engine process was lost on its way" in why
    assert tokens == [5, 6]


def test_a_rank_whose_connection_has_ended_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it was to be told would never come, and its requests would wait for ever."""
    monkeypatch.setattr(engine_group, "LOST_SECONDS", 0.2)

    def hang_up(rank: Rank, group: EngineGroup) -> None:
        rank.commands.close()

        def tell() -> None:
            group.reset_prefix_cache()
            asyncio.get_running_loop().call_later(0.02, tell)

        tell()

    why, _ = failure(tmp_path, hang_up)
    assert "the engine process cannot be reached; on host here" in why


class TwoRanks(Played):
    """A `Host` of two data-parallel ranks, each of which keeps what it is told."""

    ranks = range(2)

    async def start(self, rendezvous: Rendezvous, on_exit: OnExit) -> None:
        self._context = zmq.Context()
        self.commands = [self._context.socket(zmq.DEALER) for _ in self.ranks]
        events = self._context.socket(zmq.PUSH)
        events.connect(rendezvous.events)
        for rank, commands in enumerate(self.commands):
            commands.identity = rendezvous.identity(rank).encode()
            commands.connect(rendezvous.commands)
            events.send(encoder.encode(Outputs(outputs=[], stats=EngineStats(rank=rank))))
            ready = Ready(
                rank=rank, info={"config": {"max_running_requests": 64}}, max_context=9, vocab_size=9
            )
            events.send(encoder.encode(ready))

    def told(self) -> list[list[Command]]:
        """What has come for each rank since the last call."""
        found: list[list[Command]] = []
        for commands in self.commands:
            found.append([])
            while commands.poll(100):
                found[-1].append(command_decoder.decode(commands.recv()))
        return found


def test_ranks_are_woken_once_for_all_requests_that_begin_together(tmp_path: Path):
    """And not before all that begin with them are on their way: who finds no work sleeps again."""

    async def life() -> list[list[list[Command]]]:
        host, ready = TwoRanks(), asyncio.Event()
        addresses = {name: f"ipc://{tmp_path}/{name}" for name in ("commands", "events")}
        config = ServerConfig(tp_size=2, dp_size=2, ep_size=2, enable_dp_attention=True)
        group = EngineGroup(config, [host], Rendezvous(number=1, init_method="", **addresses))
        running = asyncio.create_task(group.run(ready.set))
        await ready.wait()
        host.told()
        turns = []
        for turn in range(2):
            for i in range(20):
                sampling = SamplingParams(max_tokens=9)
                request = AddRequest(id=f"{turn}-{i}", prompt_ids=[1], sampling=sampling)
                group.submit(request, lambda output: None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            turns.append(host.told())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return turns

    for turn in asyncio.run(asyncio.wait_for(life(), 60)):
        for commands in turn:
            assert [type(command) for command in commands] == [AddRequest] * 10 + [Wake]
