"""What a group makes of messages that get lost between it and a rank, which is played over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from turnout.config import ServerConfig
from turnout.engine.messages import AddRequest, EngineStats, Event, Outputs, Ready, RequestOutput, encoder
from turnout.engine.sampling_params import SamplingParams
from turnout.parallel.health import Reading
from turnout.server.supervise import engine_group
from turnout.server.supervise.engine_group import EngineGroup
from turnout.server.supervise.ledger import EngineFailed
from turnout.server.supervise.local_ranks import OnExit, Rendezvous

REQUEST = AddRequest(id="a", prompt_ids=[1], sampling=SamplingParams(max_tokens=9))


class Rank:
    """A `Host` of one rank, which says what the test makes it say and goes on whatever happens."""

    ranks, where = range(1), "here"

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

    def kill(self) -> None:
        self._context.destroy(linger=0)

    async def gone(self) -> None:
        pass

    def readings(self) -> dict[int, Reading]:
        return {}

    def pid(self, rank: int) -> int | None:
        return None


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
