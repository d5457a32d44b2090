"""Requests on their way in: received in bounded time and memory, then parsed and tokenised.

Small bodies are prepared here, by the event loop or a thread of it. Large ones go, one after another, through
a process of their own (`large_bodies`), so that no other client waits for them; and only so many are held in
memory at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from turnout.checkpoint.locate import locate
from turnout.config import ServerConfig
from turnout.engine.ranks.local_launcher import signals_held
from turnout.engine.tokenizer import Tokenizer
from turnout.malloc import release_freed_memory
from turnout.server.api.body import Body
from turnout.server.api.connection import read_body, while_connected
from turnout.server.api.errors import ApiError, unavailable
from turnout.server.api.large_bodies import BODIES, REPLY, REQUEST, Reply, Start
from turnout.server.api.preparation import prepare
from turnout.server.api.sizes import Limits

SMALL = 32 * 2**10  # bytes; the event loop parses as many in some milliseconds
SHORT = 4 * 2**10  # bytes; as many are tokenised at once, more on a thread
HELD = 64 * 2**20  # bytes of large bodies in memory at once
MAX_WAITING = 64  # requests that wait until there is room for theirs
WAIT_SECONDS = 10  # for that
PREPARE_SECONDS = 60  # for one body

log = logging.getLogger("turnout.server")
B = TypeVar("B", bound=Body)


class Intake:
    """Reads requests. Lives in the event loop's thread, from `open` to `close`."""

    def __init__(self, max_request_bytes: int):
        self._limit = max_request_bytes
        self._room = asyncio.Semaphore(max(2, HELD // max_request_bytes))
        self._waiting = self._held = 0
        self._tokenizer: Tokenizer | None = None
        self._process: LargeBodies | None = None

    def open(self, tokenizer: Tokenizer, limits: Limits, config: ServerConfig) -> None:
        """Get ready to read. `tokenizer` is that of the model in `config`."""
        self._tokenizer, self._limits = tokenizer, limits
        self._process = LargeBodies(
            Start(
                folder=str(locate(config.model)),
                trust_remote_code=config.trust_remote_code,
                **dataclasses.asdict(limits),
            )
        )

    async def close(self) -> None:
        if self._process:
            await self._process.close()

    async def read(self, cls: type[B], request: Request) -> tuple[B, Any]:
        """See `preparation.prepare`. Raises ApiError also with 408, 413 and 503, ClientDisconnect."""
        assert self._tokenizer is not None
        assert self._process is not None
        async with AsyncExitStack() as stack:

            async def on_large() -> None:
                await stack.enter_async_context(self._hold())

            raw = await read_body(request, self._limit, small=SMALL, on_large=on_large)
            if len(raw) > SMALL:
                return await while_connected(request.receive, self._process.prepare(cls, raw))
        if len(raw) > SHORT:
            return await asyncio.to_thread(prepare, cls, raw, self._tokenizer, self._limits)
        return prepare(cls, raw, self._tokenizer, self._limits)

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        """Room for one large body. Raises ApiError 503 if there is none for too long."""
        if self._room.locked() and self._waiting >= MAX_WAITING:
            raise _busy()
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._room.acquire()
        except TimeoutError:
            raise _busy() from None
        finally:
            self._waiting -= 1
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._room.release()
            if not self._held:
                release_freed_memory()


def _busy() -> ApiError:
    return unavailable("too many large requests at once; try again later", "busy")


class LargeBodies:
    """The process of large bodies, started again when it has ended."""

    def __init__(self, start: Start):
        self._start_line = json.dumps(dataclasses.asdict(start)).encode() + b"\n"
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._job: asyncio.Task[Any] = asyncio.create_task(self._warm_up())
        self._warming = self._job

    async def prepare(self, cls: type[B], raw: bytes | bytearray) -> tuple[B, Any]:
        """See `preparation.prepare`. Raises ApiError also with 503 if the process fails or takes too long."""
        await self._turn.acquire()
        # Not cancelled when this client leaves: the answer to it must be read before the next one's.
        self._job = asyncio.create_task(self._ask(BODIES.index(cls), raw))
        self._job.add_done_callback(lambda job: self._turn.release())
        prepared, refusal = await asyncio.shield(self._job)
        if refusal is not None:
            status, message, param, code = refusal
            raise ApiError(status, message, param=param, code=code)
        return prepared

    async def close(self) -> None:
        tasks = {self._warming, self._job}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._end()

    async def _warm_up(self) -> None:
        async with self._turn:
            if self._process is None:  # no body has come before this task had its turn
                self._process = await self._launch()

    async def _ask(self, kind: int, raw: bytes | bytearray) -> Reply:
        try:
            async with asyncio.timeout(PREPARE_SECONDS):
                if self._process is None or self._process.returncode is not None:
                    self._process = await self._launch()
                return await self._exchange(self._process, kind, raw)
        except TimeoutError:
            await self._end()
            message = (
                f"the request took more than {PREPARE_SECONDS} s to parse and tokenise; send less at once"
            )
            return None, (503, message, None, "busy")
        except (OSError, EOFError):
            log.warning("the process that parses large requests has died; the next one starts it again")
            await self._end()
            message = "the process that parses large requests has died over this one; send less at once"
            return None, (503, message, None, "busy")

    async def _exchange(self, process: Process, kind: int, raw: bytes | bytearray) -> Reply:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(REQUEST.pack(kind, len(raw)))
        process.stdin.write(raw)
        await process.stdin.drain()
        is_last, size = REPLY.unpack(await process.stdout.readexactly(REPLY.size))
        reply = pickle.loads(await process.stdout.readexactly(size))
        if is_last:
            await process.wait()
        return reply

    async def _launch(self) -> Process:
        with signals_held():
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "turnout.server.api.large_bodies"), stdin=PIPE, stdout=PIPE
            )
        assert process.stdin is not None
        process.stdin.write(self._start_line)
        return process

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._process = None
