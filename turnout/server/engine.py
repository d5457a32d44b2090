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
from typing import Any

import zmq

from turnout.config import Config
from turnout.engine.messages import (
    Abort,
    AddRequest,
    Command,
    EngineStats,
    Event,
    Failed,
    Outputs,
    Ready,
    RequestOutput,
    Shutdown,
    encoder,
    event_decoder,
)

RANK = b"0"  # the name by which our ROUTER knows the engine's DEALER
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
        self.started = asyncio.Event()  # set when ready
        self._sinks: dict[str, Sink] = {}
        self._process: Process | None = None
        self._last_words: asyncio.Future[Failed]
        self._stopping = False
        self._folder = folder
        self._context = zmq.Context()
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

    async def run(self) -> None:
        """Start the process and pass its events on until it ends. Raises EngineFailed unless stopped."""
        loop = asyncio.get_running_loop()
        self._process = await self._spawn()
        ended = asyncio.create_task(self._process.wait())
        self._last_words = loop.create_future()
        descriptor = self._events.fileno()
        loop.add_reader(descriptor, self._on_events)
        try:
            either: set[asyncio.Future[Any]] = {ended, self._last_words}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._last_words.done() and not self._stopping:
                await asyncio.wait({self._last_words}, timeout=LAST_WORDS_SECONDS)
            if not self._stopping:
                failure = await self._cause(ended)
                self._fail(failure)
                raise failure
        finally:
            loop.remove_reader(descriptor)
            ended.cancel()
            self.kill()

    def submit(self, request: AddRequest, sink: Sink) -> None:
        """Generate; `sink` is called for every output, or once with the failure of the engine.

        The engine must be serving.
        """
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
        if self.ready is None:  # still loading, and deaf
            self.kill()
        elif self._process and self._process.returncode is None:
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

    def _socket(self, name: str) -> zmq.Socket:
        socket = self._context.socket(zmq.ROUTER if name == "commands" else zmq.PULL)
        socket.set_hwm(0)
        socket.bind(self._address(name))
        return socket

    def _send(self, command: Command) -> None:
        # A ROUTER drops what nobody is there to get: the engine is gone, as `run` is about to find.
        self._commands.send_multipart([RANK, encoder.encode(command)])

    async def _spawn(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "turnout.engine.worker", stdin=PIPE, stdout=sys.stderr.fileno()
        )
        start = {
            "folder": str(self._folder),
            "config": {f.name: getattr(self.config, f.name) for f in fields(Config)},
            "rank": 0,
            "init_method": f"file://{self._folder / 'join'}",
            "commands": self._address("commands"),
            "events": self._address("events"),
            "identity": RANK.decode(),
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(start).encode() + b"\n")
        return process

    def _address(self, name: str) -> str:
        return f"ipc://{self._folder / name}"

    async def _cause(self, ended: asyncio.Task[int]) -> EngineFailed:
        """What the engine said before it went, or how it went."""
        if self._last_words.done():
            said = self._last_words.result()
            return EngineFailed(said.message, user_error=said.user_error)
        return EngineFailed(f"the engine process {_describe_exit(await ended)}")

    def _on_events(self) -> None:
        """Receive until nothing is left: the descriptor tells of changes only, not of what remains."""
        while True:
            try:
                raw = self._events.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(event_decoder.decode(raw))

    def _handle(self, event: Event) -> None:
        self.heard = time.monotonic()
        if isinstance(event, Outputs):
            self._deliver(event)
        elif isinstance(event, Ready):
            self.ready = event
            self.started.set()
        elif not self._last_words.done():
            self._last_words.set_result(event)

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
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(failure)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = "; it may have run out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
