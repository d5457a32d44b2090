"""The life of a server: bind, start the engine, serve, drain."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from turnout.config import ServerConfig, lifeline
from turnout.engine.fork_server import ForkServer
from turnout.engine.ranks.local_launcher import STOP_SIGNALS, stop_signals
from turnout.errors import PlanRefused, UserError
from turnout.parallel.hardware import may_have_gpu
from turnout.parallel.topology import Topology
from turnout.server.api.app import create_app
from turnout.server.api.control import Control
from turnout.server.api.service import Service
from turnout.server.dashboard.feed import Feed
from turnout.server.dashboard.routes import dashboard_routes
from turnout.server.http_server import WAITING_CONNECTIONS, http_server
from turnout.server.http_workers.pool import HttpWorkers
from turnout.server.supervise.engine import EngineSupervisor
from turnout.server.supervise.rank_protocol import head_address

READY = "Turnout is ready at "  # the line that launch.py waits for
MOST_PROCESSES = 16  # that serve HTTP, unless more are asked for
FILES_NOTED = 30  # seconds between two lines about connections that there are no files for
LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # an address to reach a server that listens on all

log = logging.getLogger("turnout.server")


def check_hosts(config: ServerConfig) -> None:
    """Raises UserError unless this host has a place among --nnodes."""
    if config.node_rank >= config.nnodes:
        raise UserError(
            f"--node-rank {config.node_rank}: with --nnodes {config.nnodes} it is 0 to {config.nnodes - 1}"
        )
    if config.has_remote_ranks:
        if refusals := Topology.of(config).refusals():
            raise PlanRefused("the ranks cannot be arranged as asked", refusals)
        if config.distributed_executor_backend != "ray":  # which finds an address itself
            head_address(config)


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises UserError, before any weight is read, if the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UserError(f"--host {host}: {error.strerror}") from None
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(
            WAITING_CONNECTIONS
        )  # now, since two sockets may be bound to a port that neither listens on
    except OSError as error:
        listener.close()
        remedy = (
            "give another --port (0: any free one), or stop what uses it"
            if error.errno == errno.EADDRINUSE
            else "give an address of this machine as --host, and a --port that you may use"
        )
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; {remedy}") from None
    return listener


def http_processes(config: ServerConfig) -> int:
    """How many serve HTTP. One passes some 30,000 tokens a second on, which two GPUs may compute."""
    if config.api_server_count or config.dp_size == 1:
        return max(1, config.api_server_count)
    on_gpus = config.device == "cuda" or (config.device == "auto" and may_have_gpu())
    return min(config.dp_size + 1, MOST_PROCESSES) if on_gpus else 1


class Supervisor:
    """Runs the HTTP server and the engine, and drains between them."""

    def __init__(
        self,
        config: ServerConfig,
        listener: socket.socket,
        secret: bytes,
        failure: Future[None] | None,
        fork_server: ForkServer | None = None,
    ):
        """secret: of ranks that are to dial in, if any are. failure: ends the server with its exception.
        fork_server: of the ranks here, which the engine closes."""
        self.config = config
        self.listener = listener
        self.engine = EngineSupervisor(config, secret, fork_server)
        self.service = Service(config, self.engine)
        self.workers: HttpWorkers | None = None
        if (count := http_processes(config)) > 1:
            self.workers = HttpWorkers(config, count, listener, self.engine, self.service.metrics)
        self.control = Control(self.service, self.engine, self._count_elsewhere)
        self.feed = Feed(self.control)
        self._tracer = self.service.observe_requests()
        self._told_to_stop = asyncio.Event()
        self._failure = failure or Future()
        self._files_noted = -math.inf

    @property
    def base_url(self) -> str:
        """For clients on this machine."""
        host, port = self.listener.getsockname()[:2]
        host = LOCAL.get(host, host)
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    def _count_elsewhere(self) -> int:
        return self.workers.active if self.workers else 0

    async def run(self) -> int:
        """The exit code. Raises EngineFailed, UserError (of the tokenizer)."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_exception)
        hold = partial(signal.pthread_sigmask, signal.SIG_BLOCK, STOP_SIGNALS)
        loop.set_default_executor(ThreadPoolExecutor(initializer=hold))  # signals come to this thread
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        self._follow_launcher(loop)
        app = create_app(self.control)
        app.routes.extend(dashboard_routes(self.feed, self.config.api_key))
        http = http_server(app, self.config.log_level)
        own = self.workers.listen() if self.workers else self.listener
        serving = asyncio.create_task(http.serve(sockets=[own]))
        workers = asyncio.create_task(self.workers.run()) if self.workers else asyncio.Future[None]()
        engine = asyncio.create_task(self.engine.run())
        life = asyncio.create_task(self._live())
        failure = asyncio.wrap_future(self._failure)
        try:
            parts = (engine, life, serving, workers, failure)
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                if part.done():
                    part.result()
        finally:
            life.cancel()
            self.feed.close()
            if self.workers:
                await self.workers.close()
                await asyncio.wait({workers})
            http.should_exit = True
            await asyncio.wait({serving})
            await self.service.intake.close()
            self.engine.stop()
            await asyncio.wait({engine})
            if self._tracer:
                await asyncio.to_thread(self._tracer.close)
        engine.result()  # it may have failed while it left
        return 0

    async def _live(self) -> None:
        """Load, announce, wait for a signal, drain."""
        stop = asyncio.create_task(self._told_to_stop.wait())
        loading = asyncio.create_task(self._load())
        await asyncio.wait({stop, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            gc.collect()
            gc.freeze()  # what there is now stays; to look through it took each full collection 60 ms
            sys.stdout.write(f"{READY}{self.base_url}\n")  # all at once: other threads may write, too
            sys.stdout.flush()
            await stop
        loading.cancel()
        await self._drain()

    async def _load(self) -> None:
        tokenizer = await self.service.load_tokenizer()
        await self.engine.started.wait()
        self.service.open(tokenizer, reads=self.workers is None)
        if self.workers:
            await self.workers.opened()

    async def _drain(self) -> None:
        """No new requests; wait for the running ones."""
        self.service.draining = True
        if self.control.num_active:
            log.info("waiting for %d requests to finish", self.control.num_active)
        ending = [self.service.wait_idle()] + ([self.workers.drain()] if self.workers else [])
        try:
            await asyncio.wait_for(asyncio.gather(*ending), self.config.shutdown_timeout)
        except TimeoutError:
            log.warning("--shutdown-timeout is over: cutting %d requests off", self.control.num_active)
            self.service.cut_off()
            if self.workers:
                self.workers.cut_off()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What is not awaited. asyncio reports hundreds of times a second that it accepts nothing."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._files_noted + FILES_NOTED:
            self._files_noted = loop.time()
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.error("%s (`ulimit -n` is %d): new connections wait until others close", error.strerror, soft)

    def _on_signal(self, number: int) -> None:
        if self._told_to_stop.is_set():
            if number == signal.SIGHUP:  # a shell and the system both send it when a terminal closes
                return
            self.engine.end_at_once()
            os._exit(128 + number)
        self._leave()

    def _leave(self) -> None:
        self.engine.leave()  # now: a rank's end may be known next
        self._told_to_stop.set()

    def _follow_launcher(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop when the process that launched this server has ended, if one did (launch.py)."""
        descriptor = lifeline()
        if descriptor < 0:
            return

        def ended() -> None:
            loop.remove_reader(descriptor)
            self._leave()

        loop.add_reader(descriptor, ended)
