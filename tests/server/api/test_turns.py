"""One request for much work, and many requests at once, leave turns of the event loop to others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from tests.tiny import write_tokenizer
from turnout.config import ServerConfig
from turnout.engine.messages import AddRequest
from turnout.engine.tokenizer import Tokenizer
from turnout.server.api import turns
from turnout.server.api.errors import ApiError
from turnout.server.api.protocol import CompletionBody
from turnout.server.api.service import Service
from turnout.server.api.sizes import Limits
from turnout.server.api.turns import BEGUN_AT_ONCE, Turns
from turnout.server.http_server import HttpServer
from turnout.server.run import bind


class Engine:
    """Takes requests and never answers."""

    accepting = True
    failure = None
    last_failure = "rank 0 was killed"

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.reserved = 0

    @property
    def num_requests(self) -> int:
        return len(self.ids)

    async def reserve(self, count: int, room: int) -> int | None:
        present = self.num_requests + self.reserved
        self.reserved += count if present + count <= room else 0
        return None if present + count <= room else present

    def unreserve(self, count: int) -> None:
        self.reserved -= count

    def submit(self, request: AddRequest, sink: object) -> None:
        self.reserved -= 1
        self.ids.add(request.id)

    def abort(self, ids: Iterable[str]) -> None:
        self.ids.difference_update(ids)


class Ticks:
    """While this runs: how often other tasks had a turn, and the most that `count` grew between two."""

    def __init__(self, count: Callable[[], int]):
        self.number = self.most = 0
        self._count = count

    async def __aenter__(self) -> Ticks:
        self._task = asyncio.create_task(self._run())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        last = self._count()
        while True:
            await asyncio.sleep(0)
            self.number += 1
            self.most = max(self.most, self._count() - last)
            last = self._count()


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Service, Engine]:
    """A service that lets in 2048 sequences and gives up its turn after each."""
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)
    write_tokenizer(tmp_path)
    engine = Engine()
    config = ServerConfig(model=str(tmp_path), max_running_requests=48, max_queued_requests=2000)
    opened = Service(config, engine)  # type: ignore[arg-type]
    opened._room = 48 + 2000  # what `open` makes of the flags above
    opened.tokenizer = Tokenizer.load(tmp_path)
    opened.limits = Limits(model=opened.model_name, max_context=512, vocab_size=384)
    return opened, engine


def start(opened: Service, prompts: int, n: int) -> Awaitable[object]:
    return opened.complete(CompletionBody(prompt="a", n=n), [[65 + i % 50] for i in range(prompts)])


def test_others_have_turns_while_many_sequences_are_started(opened: tuple[Service, Engine]):
    made, engine = opened

    async def scenario() -> None:
        async with Ticks(lambda: engine.num_requests) as ticks:
            await start(made, prompts=16, n=128)
        assert engine.num_requests == 2048
        assert ticks.most == 1
        assert ticks.number >= 2048

    asyncio.run(scenario())


def test_sequences_that_are_being_started_count_as_running(opened: tuple[Service, Engine]):
    made, engine = opened

    async def scenario() -> None:
        both = await asyncio.gather(start(made, 16, 100), start(made, 16, 100), return_exceptions=True)
        assert engine.num_requests == 1600
        (refused,) = (one for one in both if isinstance(one, ApiError))
        assert (refused.status, refused.code) == (503, "queue_full")
        await start(made, 16, 28)  # exactly what is left

    asyncio.run(scenario())


def test_a_start_ends_with_the_engine(opened: tuple[Service, Engine]):
    made, engine = opened

    async def scenario() -> None:
        starting = asyncio.ensure_future(start(made, 16, 128))
        while engine.num_requests < 100:
            await asyncio.sleep(0)
        engine.accepting = False
        with pytest.raises(ApiError, match="restarting"):
            await starting
        assert made.num_active == engine.num_requests == 0
        engine.accepting = True
        await start(made, 16, 128)  # nothing remains promised

    asyncio.run(scenario())


def test_requests_that_come_together_begin_a_few_at_a_time_and_probes_first():
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])

    async def scenario() -> None:
        gate, unused = Turns(app), None
        async with Ticks(lambda: len(begun)) as ticks:
            paths = [f"/{i}" for i in range(200)]
            calls = [
                asyncio.create_task(gate({"type": "http", "path": path}, unused, unused))  # type: ignore[arg-type]
                for path in [*paths, "/health"]
            ]
            calls[100].cancel()
            await asyncio.wait(calls)
        assert begun.index("/health") == BEGUN_AT_ONCE
        assert [path for path in begun if path != "/health"] == paths[:100] + paths[101:]
        assert 0 < ticks.most <= BEGUN_AT_ONCE + 1

    asyncio.run(scenario())


def test_a_flood_of_connections_is_accepted_a_few_at_a_time():
    clients, begun = 200, 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += 1
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def scenario(listener: socket.socket) -> None:
        server = HttpServer(
            uvicorn.Config(app, lifespan="off", log_level="error", backlog=BEGUN_AT_ONCE, http="h11")
        )
        async with Ticks(lambda: begun) as ticks:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while begun < clients:
                await asyncio.sleep(0)
        assert 0 < ticks.most <= BEGUN_AT_ONCE
        server.should_exit = True
        await serving

    listener = bind("127.0.0.1", 0)
    waiting = [socket.create_connection(listener.getsockname()) for _ in range(clients)]
    for client in waiting:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    asyncio.run(asyncio.wait_for(scenario(listener), 60))
    for client in waiting:
        assert client.recv(100).startswith(b"HTTP/1.1 204 ")
        client.close()
