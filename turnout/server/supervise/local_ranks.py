"""The rank processes of one host, for one start of the group: start them, notice exits, leave nothing behind.

Each rank's standard input brings its orders and stays open: when it ends, whoever started the rank is gone,
and the rank leaves too, however its parent died. A private folder holds the files that the ranks share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from turnout.checkpoint.fingerprint import stamp
from turnout.checkpoint.locate import locate
from turnout.config import Config, ServerConfig
from turnout.engine.fork_server import ForkServer
from turnout.engine.ranks.local_launcher import LocalLauncher, describe_exit, rank_environment
from turnout.errors import UserError
from turnout.parallel.health import Board, Reading
from turnout.parallel.topology import Topology
from turnout.server.supervise.secret import curve_keys

GONE_SECONDS = 30.0  # for killed processes to vanish: a GPU's driver takes its time

log = logging.getLogger("turnout.server")


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one start of the group meet the server, and each other.

    number:      of this life; part of the ranks' names, so that none is taken for an earlier one
    commands:    ZeroMQ address of the server's ROUTER. events: of its PULL.
    init_method: torch.distributed's
    towards:     an address of another host (or of this one) to which ranks' connections go
    waiting:     requests that go on as soon as the ranks are ready
    """

    number: int
    commands: str
    events: str
    init_method: str
    towards: str = "127.0.0.1"
    waiting: int = 0

    def identity(self, rank: int) -> str:
        return f"{self.number}:{rank}"


OnExit = Callable[[int, str, bool], None]  # rank, how it ended, whether by a signal


class Host(Protocol):
    """The ranks of one host. where: what its user calls it."""

    ranks: range
    where: str

    async def start(self, rendezvous: Rendezvous, on_exit: OnExit) -> None:
        """Start them all; `on_exit` is called as each one ends, expected or not."""
        ...

    def kill(self) -> None:
        """End them at once."""
        ...

    async def gone(self) -> None:
        """Wait until all have ended, and forget them."""
        ...

    def readings(self) -> Mapping[int, Reading]:
        """What each rank does, as far as known."""
        ...

    def pid(self, rank: int) -> int | None: ...


class LocalRanks:
    """A `Host`: this one."""

    def __init__(
        self,
        config: ServerConfig,
        ranks: range,
        fork_server: ForkServer,
        *,
        secret: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ):
        """secret: for sockets that reach other hosts, see secret.py. environment: beyond ours."""
        self.ranks = ranks
        self._fork_server = fork_server
        self._secret, self._environment = secret, dict(environment or {})
        self.where = socket.gethostname()
        self._launcher = LocalLauncher("the sockets between the processes of the server")
        self._config = config
        self._board = Board(self.folder / "board", config.tp_size)
        self._running = 0
        self._none_runs = asyncio.Event()

    @property
    def folder(self) -> Path:
        """Private to this launch and its ranks."""
        return self._launcher.folder

    async def start(self, rendezvous: Rendezvous, on_exit: OnExit) -> None:
        loop = asyncio.get_running_loop()

        def exited(rank: int, code: int) -> None:
            self._running -= 1
            if not self._running:
                self._none_runs.set()
            on_exit(rank, describe_exit(code), code < 0)

        def report(rank: int, code: int) -> None:
            with suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(exited, rank, code)

        environment = rank_environment(rendezvous.towards) | self._environment
        weights = ""
        with suppress(OSError, UserError):  # ranks say what is wrong with the model
            weights = stamp(locate(self._config.model))
        for rank in self.ranks:
            keeper = self._gpu(rank) if self._config.enable_weight_keeper else None
            process = self._fork_server.fork(environment, weights, keeper)
            self._launcher.watch(rank, process, report)
            self._running += 1
            with suppress(BrokenPipeError):  # it has ended already, as `report` says
                process.stdin.write(self._orders(rendezvous, rank))

    def make_spares(self) -> None:
        """Now that these ranks serve, have processes wait to take their places, their GPUs opened already."""
        if self._config.enable_weight_keeper and self._config.device != "cpu":
            for rank in self.ranks:
                self._fork_server.make_spare(self._gpu(rank))

    def _gpu(self, rank: int) -> int:
        return rank % Topology.of(self._config, rank).ranks_per_node

    def kill(self) -> None:
        self._launcher.kill()

    async def gone(self) -> None:
        if self._running:
            try:
                async with asyncio.timeout(GONE_SECONDS):
                    await self._none_runs.wait()
            except TimeoutError:
                log.error("%d killed processes are still there", self._running)
        self._launcher.hang_up()
        self.remove_folder()
        self._board.close()

    def remove_folder(self) -> None:
        self._launcher.remove_folder()

    def readings(self) -> dict[int, Reading]:
        return {} if self._board.closed else {rank: self._board.read(rank) for rank in self.ranks}

    def pid(self, rank: int) -> int | None:
        process = self._launcher.processes.get(rank)
        return process.pid if process else None

    def _orders(self, rendezvous: Rendezvous, rank: int) -> bytes:
        orders = {
            "folder": str(self.folder),
            "config": {f.name: getattr(self._config, f.name) for f in fields(Config)},
            "verify": self._config.verify,
            "rank": rank,
            "init_method": rendezvous.init_method,
            "commands": rendezvous.commands,
            "events": rendezvous.events,
            "identity": rendezvous.identity(rank),
            "waiting": rendezvous.waiting,
        }
        if self._secret:
            orders["curve"] = [curve_keys(self._secret, "head")[0], *curve_keys(self._secret, "rank")]
        return json.dumps(orders).encode() + b"\n"
