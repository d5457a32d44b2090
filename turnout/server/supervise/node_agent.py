"""`turnout serve --node-rank 1` and above: the ranks of one more host, at the service of the head.

0  the head, or a signal, told it to leave   1  the head failed
2  a user error: the head cannot be reached, or refuses what this host was started with
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from contextlib import suppress

from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.server.supervise import node_protocol
from turnout.server.supervise.local_ranks import LocalRanks, Rendezvous

RETRY_SECONDS = 0.5
REPORT_SECONDS = 0.25

log = logging.getLogger("turnout.server")


def serve_ranks(config: ServerConfig) -> int:
    """Run ranks for the head until told to leave; the exit code. Raises UserError."""
    return asyncio.run(NodeAgent(config).run())


class NodeAgent:
    """Connects to the head, again if the connection ends, and does what it says."""

    def __init__(self, config: ServerConfig):
        per_node = config.tp_size // config.nnodes
        self._config = config
        self._own = range(config.node_rank * per_node, (config.node_rank + 1) * per_node)
        self._address = node_protocol.head_address(config)
        self._ranks: LocalRanks | None = None
        self._number = 0
        self._reporting: asyncio.Task[None] | None = None
        self._told_to_stop = asyncio.Event()
        self._code: int | None = None
        self._welcome = False
        self._contact = time.monotonic()  # with the head, the last one

    async def run(self) -> int:
        """The exit code. Raises UserError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop.set)
        life = asyncio.create_task(self._live())
        stop = asyncio.create_task(self._told_to_stop.wait())
        try:
            await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
            return life.result() if life.done() else 0
        finally:
            stop.cancel()
            life.cancel()
            await asyncio.wait({life})
            await self._end_ranks()

    async def _live(self) -> int:
        while True:
            try:
                reader, writer = await asyncio.open_connection(*self._address)
            except OSError as error:
                self._check_patience(error.strerror or str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                await self._serve(reader, writer)
            except asyncio.CancelledError:
                node_protocol.send(writer, node_protocol.Leaving())
                raise
            except OSError as error:
                log.warning("lost the head: %s", error)
            finally:
                with suppress(OSError):
                    await writer.drain()
                writer.close()
                await self._end_ranks()
            if self._welcome:
                self._contact, self._welcome = time.monotonic(), False
            if self._code is not None:
                return self._code
            await asyncio.sleep(RETRY_SECONDS)

    def _check_patience(self, why: str) -> None:
        if time.monotonic() - self._contact > self._config.startup_timeout:
            host, port = self._address
            raise UserError(
                f"the head at {host}:{port} was not reached within --startup-timeout "
                f"{self._config.startup_timeout:g} s: {why}; start `turnout serve --node-rank 0` there, "
                "or correct --dist-init-addr"
            )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends."""
        node_protocol.keep_alive(writer)
        node_protocol.send(writer, node_protocol.hello(self._config))
        while self._code is None and (line := await reader.readline()):
            await self._execute(node_protocol.to_agent.decode(line), writer)
        if self._code is None:
            log.warning("the head closed the connection; trying again")

    async def _execute(self, message: node_protocol.ToAgent, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, node_protocol.Refused):
            raise UserError(f"the head at {self._config.dist_init_addr} refuses this host: {message.reason}")
        if isinstance(message, node_protocol.Leave):
            if message.reason:
                sys.stderr.write(f"error: the head failed: {message.reason}\n")
            self._code = 1 if message.reason else 0
        elif isinstance(message, node_protocol.Later):
            self._check_patience(message.reason)
        elif isinstance(message, node_protocol.Start):
            await self._start_ranks(message.rendezvous, writer)
        elif isinstance(message, node_protocol.Stop):
            if message.number == self._number:
                await self._end_ranks()
            node_protocol.send(writer, node_protocol.Gone(message.number))
        else:
            log.info("ranks %d to %d are at the service of the head", self._own[0], self._own[-1])
            self._welcome = True

    async def _start_ranks(self, rendezvous: Rendezvous, writer: asyncio.StreamWriter) -> None:
        await self._end_ranks()
        number = self._number = rendezvous.number

        def on_exit(rank: int, how: str, by_signal: bool) -> None:
            node_protocol.send(writer, node_protocol.Exited(number, rank, how, by_signal))

        ranks = self._ranks = LocalRanks(self._config, self._own)
        await ranks.start(rendezvous, on_exit)
        pids = {rank: ranks.pid(rank) or 0 for rank in self._own}
        node_protocol.send(writer, node_protocol.Started(number, pids))
        self._reporting = asyncio.create_task(self._report(ranks, number, writer))

    async def _report(self, ranks: LocalRanks, number: int, writer: asyncio.StreamWriter) -> None:
        while True:
            node_protocol.send(writer, node_protocol.Readings(number, ranks.readings()))
            await asyncio.sleep(REPORT_SECONDS)

    async def _end_ranks(self) -> None:
        if self._reporting:
            self._reporting.cancel()
            self._reporting = None
        if self._ranks:
            ranks, self._ranks = self._ranks, None
            ranks.kill()
            await ranks.gone()
