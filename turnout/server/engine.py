"""The engine process as the server sees it: start it, send commands, pass outputs on, notice its death.

The engine runs in a process of its own, so that Python code of the HTTP side never delays a step and
this process needs no torch. Two ZeroMQ sockets in a private folder carry messages.py. The engine's
standard input brings its configuration and stays open: when it ends, the server is gone and the engine
leaves too, however the server died.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import zmq
import zmq.asyncio

from turnout.config import Config
from turnout.engine.messages import (
    Abort,
    AddRequest,
    Command,
    EngineStats,
    Failed,
    Outputs,
    Ready,
    RequestOutput,
    Shutdown,
    encoder,
    event_decoder,
)

LAST_WORDS_SECONDS = 1.0  # how long an ended process's messages may still be on their way
STOP_SECONDS = 5.0


class EngineFailed(Exception):
    """The engine cannot go on. `user_error` tells a wrong input from a bug."""

    def __init__(self, message: str, *, user_error: bool = False):
        super().__init__(message)
        self.user_error = user_error


Sink = Callable[[RequestOutput | EngineFailed], None]


class Engine:
    """Requests go in through `submit`; each one's outputs come back through its sink, in order."""

    def __init__(self, config: Config, folder: Path):
        """`folder` holds the sockets and must be readable by this user only."""
        self.config = config
        self.ready: Ready | None = None
        self.failure: EngineFailed | None = None
        self.stats: dict[int, EngineStats] = {}
        self.expert_tokens: dict[int, list[list[int]]] = {}  # by rank, each [layer][expert]
        self.heard = time.monotonic()
        self.started = asyncio.Event()  # set when ready or failed
        self._sinks: dict[str, Sink] = {}
        self._process: Process | None = None
        self._stopping = False
        self._folder = folder
        self._context = zmq.asyncio.Context()
        # Queues are bounded by the number of requests admitted, not by message counts.
        self._commands = self._socket("commands")
        self._events = self._socket("events")

    @property
    def num_requests(self) -> int:
        """Submitted and not finished."""
        return len(self._sinks)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def serving(self) -> bool:
        return self.ready is not None and self.failure is None

    async def run(self) -> None:
        """Start the process and pass its events on until it ends. Raises EngineFailed unless stopped."""
        self._process = await self._spawn()
        ended = asyncio.create_task(self._process.wait())
        receiving = asyncio.create_task(self._receive())
        late = asyncio.create_task(self._give_up_loading())
        try:
            await asyncio.wait({ended, receiving, late}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await asyncio.wait({receiving}, timeout=LAST_WORDS_SECONDS)
            if self._stopping:
                return
            if receiving.done():
                receiving.result()  # raises what the engine said
            if late.done():
                late.result()
            raise EngineFailed(f"the engine process {_describe_exit(ended.result())}")
        except EngineFailed as failure:
            self._fail(failure)
            raise
        finally:
            for task in (ended, receiving, late):
                task.cancel()
            self.kill()

    def submit(self, request: AddRequest, sink: Sink) -> None:
        """Generate; `sink` is called for every output, or once with the failure of the engine."""
        if self.failure:
            raise self.failure
        self._sinks[request.id] = sink
        self._send(request)

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; those unknown or finished are ignored."""
        live = [id for id in ids if self._sinks.pop(id, None) is not None]
        if live:
            self._send(Abort(live))

    async def stop(self) -> None:
        """End the process, gently if it listens. `run` returns."""
        self._stopping = True
        if self._process and self._process.returncode is None:
            self._send(Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except TimeoutError:
                self.kill()

    def kill(self) -> None:
        if self._process and self._process.returncode is None:
            self._process.kill()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _socket(self, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.PUSH if name == "commands" else zmq.PULL)
        socket.set_hwm(0)
        socket.bind(f"ipc://{self._folder / name}")
        return socket

    def _send(self, command: Command) -> None:
        self._commands.send(encoder.encode(command), zmq.NOBLOCK)

    async def _spawn(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "turnout.engine.worker", stdin=PIPE, stdout=sys.stderr.fileno()
        )
        values = {f.name: getattr(self.config, f.name) for f in fields(Config)}
        assert process.stdin is not None
        process.stdin.write(json.dumps({"folder": str(self._folder), "config": values}).encode() + b"\n")
        return process

    async def _give_up_loading(self) -> None:
        seconds = getattr(self.config, "startup_timeout", None)
        try:
            await asyncio.wait_for(self.started.wait(), seconds)
        except TimeoutError:
            raise EngineFailed(
                f"the engine did not load within {seconds:g} s; raise --startup-timeout", user_error=True
            ) from None
        await asyncio.Future()  # loaded: never again a reason to stop

    async def _receive(self) -> None:
        while True:
            event = event_decoder.decode(await self._events.recv())
            self.heard = time.monotonic()
            if isinstance(event, Outputs):
                self._deliver(event)
            elif isinstance(event, Ready):
                self.ready = event
                self.started.set()
            elif isinstance(event, Failed):
                raise EngineFailed(event.message, user_error=event.user_error)

    def _deliver(self, event: Outputs) -> None:
        stats = event.stats
        self.stats[stats.rank] = stats
        if stats.expert_tokens is not None:
            self.expert_tokens[stats.rank] = stats.expert_tokens
        for output in event.outputs:
            finished = output.finish_reason is not None
            sink = self._sinks.pop(output.id, None) if finished else self._sinks.get(output.id)
            if sink is not None:  # else aborted while this was on its way
                sink(output)

    def _fail(self, failure: EngineFailed) -> None:
        self.failure = failure
        self.started.set()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(failure)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = "; it may have run out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
