"""A process that serves HTTP for the head.

    python -m turnout.server.http_workers.worker MESSAGES CONNECTIONS HEAD

Two inherited sockets bring messages and connections; their end means that the head is gone. HEAD is the Unix
socket on which it serves HTTP to workers. Standard input brings the configuration, pickled.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import resource
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from turnout.config import ServerConfig
from turnout.engine.messages import Ready
from turnout.engine.ranks.local_launcher import leave_signals_to_launcher
from turnout.errors import UserError
from turnout.malloc import map_large_blocks
from turnout.server.api.app import create_app_for_requests
from turnout.server.api.service import Service
from turnout.server.http_server import http_server
from turnout.server.http_workers.messages import (
    USER_ERROR,
    Channel,
    CutOff,
    Delivered,
    Ended,
    EngineState,
    Opened,
    Report,
    Reserved,
    Stop,
    ToWorker,
    worker_decoder,
)
from turnout.server.http_workers.relay import Relay
from turnout.server.http_workers.remote_engine import RemoteEngine

REPORT_SECONDS = 0.2  # between reports of what streams go through
TAKEN_AT_ONCE = 64  # connections in one turn of the event loop
OTHER_FILES = 40  # that this process may need next to connections
FULL_SECONDS = 0.1  # between looks whether there are files for connections again


class Worker:
    """Serves connections that come through `connections` until told to stop, or the head is gone."""

    def __init__(
        self, config: ServerConfig, head: str, messages: socket.socket, connections: socket.socket
    ) -> None:
        self._head, self._messages, self._connections = head, messages, connections
        self._channel = channel = Channel(worker_decoder, self._receive, self._left_alone, self._report)
        self._engine = RemoteEngine(channel.send)
        self._service = Service(config, self._engine)
        self._tracer = self._service.observe_requests()
        self._relay = Relay(head)
        self._http = http_server(create_app_for_requests(self._service, self._relay), config.log_level)
        self._ready = asyncio.Event()
        self._told_to_stop = asyncio.Event()
        self._adopted: set[asyncio.Task[None]] = set()
        self._reported: tuple[int, bool] | None = None
        self._service.on_end = channel.send

    async def run(self) -> None:
        """Raises UserError (of the tokenizer)."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=self._messages)
        serving = asyncio.create_task(self._http.serve(sockets=[]))
        reporting = asyncio.create_task(self._keep_reporting())
        opening = asyncio.create_task(self._open())
        self._listen()
        stop = asyncio.create_task(self._told_to_stop.wait())
        awaited: set[asyncio.Task[Any]] = {serving, opening, stop}
        while stop in awaited:
            done, awaited = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        opening.cancel()
        self._connections.close()
        self._http.should_exit = True
        await asyncio.wait({serving})
        reporting.cancel()
        await self._service.intake.close()
        await self._relay.close()
        if self._tracer:
            await asyncio.to_thread(self._tracer.close)
        self._channel.close()

    def _left_alone(self) -> None:
        """The head is gone."""
        if not self._told_to_stop.is_set():
            remove_socket_of(self._head)
            os._exit(1)

    def _receive(self, message: ToWorker) -> None:
        """What the head says."""
        service = self._service
        if isinstance(message, Delivered):
            self._engine.deliver(message)
        elif isinstance(message, Reserved):
            self._engine.reserved(message)
        elif isinstance(message, EngineState):
            self._engine.update(message)
            service.draining = message.draining
            self._channel.send()
        elif isinstance(message, Ended):
            self._engine.end(message)
        elif isinstance(message, Ready):
            self._engine.ready = message
            self._ready.set()
        elif isinstance(message, CutOff):
            service.cut_off()
        elif isinstance(message, Stop):
            asyncio.get_running_loop().remove_reader(self._connections)
            self._told_to_stop.set()

    def _report(self) -> list[Any]:
        """What to tell the head with the next messages, if anything has changed."""
        service = self._service
        observed = service.metrics.take()
        state = service.num_active, service.draining
        if observed is None and state == self._reported:
            return []
        self._reported = state
        return [Report(active=state[0], draining=state[1], observed=observed)]

    async def _open(self) -> None:
        tokenizer = await self._service.load_tokenizer()
        await self._ready.wait()
        self._service.open(tokenizer)
        gc.collect()
        gc.freeze()  # as the head does
        self._channel.send(Opened())

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._channel.send()

    def _listen(self) -> None:
        if not self._told_to_stop.is_set():
            asyncio.get_running_loop().add_reader(self._connections, self._take_connections)

    def _take_connections(self) -> None:
        loop = asyncio.get_running_loop()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = sys.maxsize if soft == resource.RLIM_INFINITY else soft - OTHER_FILES
        for _ in range(TAKEN_AT_ONCE):
            if self._http.num_connections + len(self._adopted) >= most:
                loop.remove_reader(self._connections)  # the head gives them to others, or keeps them waiting
                loop.call_later(FULL_SECONDS, self._listen)
                return
            try:
                _, descriptors, _, _ = socket.recv_fds(self._connections, 1, 1)
            except BlockingIOError:
                return
            if not descriptors:  # the head is gone, as the channel says, too
                loop.remove_reader(self._connections)
                return
            connection = socket.socket(fileno=descriptors[0])
            connection.setblocking(False)
            task = loop.create_task(self._http.adopt(connection))
            self._adopted.add(task)
            task.add_done_callback(self._adopted.discard)


def remove_socket_of(head: str) -> None:
    """With its folder, which was made for it: the head is gone."""
    shutil.rmtree(Path(head).parent, ignore_errors=True)


def main(messages: str, connections: str, head: str) -> int:
    """The exit code."""
    leave_signals_to_launcher()
    map_large_blocks()
    try:
        config = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):  # the head was killed before all of it was written
        remove_socket_of(head)
        return 1
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # of requests to the head
    sockets = [socket.socket(fileno=int(number)) for number in (messages, connections)]
    for one in sockets:
        one.setblocking(False)
    try:
        asyncio.run(Worker(config, head, *sockets).run())
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
