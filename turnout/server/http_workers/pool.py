"""The head's side: starts workers, hands connections to them, and passes requests and outputs on."""

from __future__ import annotations

import asyncio
import errno
import logging
import pickle
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from turnout.config import ServerConfig
from turnout.engine.messages import Abort, AddRequest, RequestOutput
from turnout.engine.ranks.local_launcher import signals_held
from turnout.errors import UserError
from turnout.server.api.turns import BEGUN_AT_ONCE
from turnout.server.http_server import SHUTDOWN_GRACE
from turnout.server.http_workers.messages import (
    USER_ERROR,
    Channel,
    CutOff,
    Delivered,
    Ended,
    EngineState,
    Failure,
    Opened,
    Report,
    Reserve,
    Reserved,
    Stop,
    ToHead,
    Unreserve,
    head_decoder,
)
from turnout.server.metrics import Metrics
from turnout.server.supervise.engine import EngineSupervisor
from turnout.server.supervise.ledger import EngineFailed

LOOK_SECONDS = 0.05  # between looks at the engine, whose state workers are told
BLOCKED_SECONDS = 0.05  # until a connection that no worker could take is offered again
NO_FILES_SECONDS = 1.0  # without accepting, where there are no files for connections
LEAVE_SECONDS = SHUTDOWN_GRACE + 5  # for a worker to leave that was told to
MAX_FAILED_STARTS = 5  # of a worker, in a row
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MODULE = "turnout.server.http_workers.worker"

log = logging.getLogger("turnout.server")


class HttpWorker:
    """One worker, from its process's start to its end."""

    def __init__(self, number: int, process: Process, connections: socket.socket):
        self.number, self.process, self.connections = number, process, connections
        self.channel: Channel
        self.opened = False
        self.active, self.draining = 0, False  # as it last reported
        self.ids: set[str] = set()  # of its requests that are not finished
        self.reserved = 0  # places in the engine that its requests have yet to take
        self.outputs: list[RequestOutput] = []  # to be sent when this turn is over
        self.told: EngineState | None = None
        self.knows_model = False  # whether it was told what the ranks said when they were ready


class HttpWorkers:
    """All workers.

    count: how many. listener: whose connections they get. metrics: where to count what they observe.
    """

    def __init__(
        self,
        config: ServerConfig,
        count: int,
        listener: socket.socket,
        engine: EngineSupervisor,
        metrics: Metrics,
    ):
        self._listener, self._engine, self._metrics = listener, engine, metrics
        self._folder = TemporaryDirectory(prefix="turnout_http_")
        self._head = f"{self._folder.name}/http"
        self._start = pickle.dumps(config)
        self._count = count
        self._workers: dict[int, HttpWorker] = {}
        self._next = 0  # number of the worker that gets the next connection
        self._offered: socket.socket | None = None  # a connection that no worker could take yet
        self._draining = self._closing = False
        self._launching = 0  # workers whose processes are being started
        self._news = asyncio.Event()
        engine.when_ready.append(self._tell_all)  # at once: clients that see it ready may ask any worker

    @property
    def active(self) -> int:
        """Requests that workers answer."""
        return sum(worker.active for worker in self._workers.values())

    def listen(self) -> socket.socket:
        """A Unix socket, on which this process is to serve HTTP to them until after `close`."""
        own = socket.socket(socket.AF_UNIX)
        own.bind(self._head)
        return own

    async def run(self) -> None:
        """Until `close`. Raises UserError or EngineFailed if a worker cannot start."""
        self._listener.setblocking(False)
        lives = [self._keep(number) for number in range(self._count)]
        tasks = [asyncio.create_task(life) for life in (self._keep_telling(), *lives)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def opened(self) -> None:
        """Return when all workers can serve."""
        await self._until(lambda: sum(w.opened for w in self._workers.values()) == self._count)

    async def drain(self) -> None:
        """Let no worker begin a request, and return when all have answered theirs."""
        self._draining = True
        self._tell_all()
        await self._until(lambda: all(w.draining and not w.active for w in self._workers.values()))

    def cut_off(self) -> None:
        """End all requests of workers with an error."""
        for worker in self._workers.values():
            worker.channel.send(CutOff())

    async def close(self) -> None:
        """Let all workers leave; `run` returns."""
        self._closing = True
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for worker in self._workers.values():
            worker.channel.send(Stop())
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._until(lambda: not self._workers and not self._launching)
        for worker in self._workers.values():
            with suppress(ProcessLookupError):
                worker.process.kill()
        self._folder.cleanup()

    async def _keep(self, number: int) -> None:
        """A worker of that number, started again whenever it has ended."""
        failed_starts = 0
        while not self._closing:
            self._launching += 1
            try:
                worker = await self._launch(number)
            finally:
                self._launching -= 1
            try:
                code = await worker.process.wait()
            finally:
                self._forget(worker)
            if self._closing:
                return
            failed_starts = 0 if worker.opened else failed_starts + 1
            if code == USER_ERROR:
                raise UserError(f"process {number} that serves HTTP could not start")
            if failed_starts >= MAX_FAILED_STARTS:
                raise EngineFailed(
                    f"process {number} that serves HTTP ended {failed_starts} times as it started"
                )
            log.error("process %d that serves HTTP has ended (%d) and is started again", number, code)

    async def _launch(self, number: int) -> HttpWorker:
        ours, theirs = socket.socketpair()
        giving, taking = socket.socketpair()
        with theirs, taking:
            pair = (str(theirs.fileno()), str(taking.fileno()))
            with signals_held():
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", MODULE, *pair, self._head),
                    pass_fds=(theirs.fileno(), taking.fileno()),
                    stdin=PIPE,
                )
        assert process.stdin is not None
        process.stdin.write(self._start)
        process.stdin.close()
        giving.setblocking(False)
        worker = HttpWorker(number, process, giving)
        worker.channel = Channel(
            head_decoder, partial(self._receive, worker), lambda: None, partial(self._collect, worker)
        )
        await asyncio.get_running_loop().create_unix_connection(lambda: worker.channel, sock=ours)
        self._workers[number] = worker
        if self._closing:  # since it was launched
            worker.channel.send(Stop())
        self._accept_again()
        return worker

    def _forget(self, worker: HttpWorker) -> None:
        """It has ended: no client waits for what it asked for."""
        if self._workers.get(worker.number) is worker:
            del self._workers[worker.number]
        worker.connections.close()
        worker.channel.close()
        if worker.process.returncode is None:  # this task is cancelled
            with suppress(ProcessLookupError):
                worker.process.kill()
        self._engine.abort(list(worker.ids))
        self._engine.unreserve(worker.reserved)
        worker.reserved = 0
        self._news.set()

    def _accept_again(self) -> None:
        if not self._closing:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Hand on what connections have come."""
        loop = asyncio.get_running_loop()
        for _ in range(BEGUN_AT_ONCE):
            if self._offered is None:
                try:
                    self._offered, _ = self._listener.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    return
                except OSError as error:
                    if error.errno not in NO_FILES:
                        raise
                    loop.call_exception_handler({"message": "out of files", "exception": error})
                    loop.remove_reader(self._listener)
                    loop.call_later(NO_FILES_SECONDS, self._accept_again)
                    return
            if not self._hand_on(self._offered):
                loop.remove_reader(self._listener)
                loop.call_later(BLOCKED_SECONDS, self._accept_again)
                return
            self._offered.close()
            self._offered = None

    def _hand_on(self, connection: socket.socket) -> bool:
        """To the worker whose turn it is, or the next that can take it; whether there was one.

        One that was started again gets none before it can serve, as long as others can.
        """
        some_serve = any(worker.opened for worker in self._workers.values())
        for _ in range(self._count):
            worker = self._workers.get(self._next)
            self._next = (self._next + 1) % self._count
            if worker is not None and (worker.opened or not some_serve):
                with suppress(OSError):  # it has more than it can open, or has ended
                    socket.send_fds(worker.connections, [b"\0"], [connection.fileno()])
                    return True
        return False

    def _receive(self, worker: HttpWorker, message: ToHead) -> None:
        if isinstance(message, AddRequest):
            worker.reserved -= 1
            self._submit(worker, message)
        elif isinstance(message, Reserve):
            present = self._engine.reserve_now(message.count, message.room)
            worker.reserved += message.count if present is None else 0
            worker.channel.send(Reserved(present))
        elif isinstance(message, Unreserve):
            worker.reserved -= message.count
            self._engine.unreserve(message.count)
        elif isinstance(message, Abort):
            worker.ids.difference_update(message.ids)
            self._engine.abort(message.ids)
        elif isinstance(message, Report):
            worker.active, worker.draining = message.active, message.draining
            if message.observed:
                self._metrics.add(message.observed)
            self._news.set()
        elif isinstance(message, Opened):
            worker.opened = True
            self._news.set()

    def _submit(self, worker: HttpWorker, request: AddRequest) -> None:
        id = request.id
        if not self._engine.accepting:  # since the worker heard of the engine
            why = self._engine.failure or self._engine.last_failure or EngineFailed("the ranks restart")
            self._engine.unreserve(1)
            return worker.channel.send(Ended(id, Failure.of(why)))

        def sink(output: RequestOutput | EngineFailed) -> None:
            if isinstance(output, EngineFailed):
                worker.ids.discard(id)
                return worker.channel.send(*self._collect(worker), Ended(id, Failure.of(output)))
            if output.finish_reason is not None:
                worker.ids.discard(id)
            worker.outputs.append(output)
            return worker.channel.send()

        worker.ids.add(id)
        self._engine.submit(request, sink)

    def _collect(self, worker: HttpWorker) -> list[Any]:
        if not worker.outputs:
            return []
        outputs, worker.outputs = worker.outputs, []
        return [Delivered(outputs)]

    async def _keep_telling(self) -> None:
        while not self._closing:
            self._tell_all()
            await asyncio.sleep(LOOK_SECONDS)

    def _tell_all(self) -> None:
        """What workers do not know of the engine."""
        engine = self._engine
        for worker in self._workers.values():
            state = EngineState(
                accepting=engine.accepting,
                draining=self._draining,
                failure=Failure.of(engine.failure) if engine.failure else None,
                last_failure=Failure.of(engine.last_failure) if engine.last_failure else None,
            )
            if engine.ready is not None and not worker.knows_model:
                worker.channel.send(engine.ready)
                worker.knows_model = True
            if state != worker.told:
                worker.channel.send(state)
                worker.told = state

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()
