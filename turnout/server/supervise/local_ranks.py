"""The rank processes of one host, for one life of the group: start them, notice exits, leave nothing behind.

Each rank's standard input brings its orders and stays open: when it ends, whoever started the rank is gone,
and the rank leaves too, however its parent died. A private folder holds the files that the ranks share.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

from turnout.cache import private_folder
from turnout.config import Config, ServerConfig
from turnout.parallel.health import Board, Reading

GONE_SECONDS = 30.0  # for killed processes to vanish: a GPU's driver takes its time
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface

log = logging.getLogger("turnout.server")


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one life of the group meet the server, and each other.

    number:      of this life; part of the ranks' names, so that none is taken for an earlier one
    commands:    ZeroMQ address of the server's ROUTER. events: of its PULL.
    init_method: torch.distributed's
    towards:     an address of another host (or of this one) to which ranks' connections go
    """

    number: int
    commands: str
    events: str
    init_method: str
    towards: str = "127.0.0.1"

    def identity(self, rank: int) -> str:
        return f"{self.number}:{rank}"


OnExit = Callable[[int, str, bool], None]  # rank, how it ended, whether by a signal


class Host(Protocol):
    """The ranks of one host."""

    ranks: range

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

    def __init__(self, config: ServerConfig, ranks: range):
        self.ranks = ranks
        self.folder = private_folder("the sockets between the processes of the server")
        self._config = config
        self._board = Board(self.folder / "board", config.tp_size)
        self._processes: dict[int, Process] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        self._killed = False

    async def start(self, rendezvous: Rendezvous, on_exit: OnExit) -> None:
        environment = _environment(rendezvous.towards)
        for rank in self.ranks:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "turnout.engine.worker"),
                stdin=PIPE,
                stdout=sys.stderr.fileno(),
                env=environment,
            )
            self._processes[rank] = process
            self._waiting.add(asyncio.create_task(_report_exit(process, rank, on_exit)))
            assert process.stdin is not None
            process.stdin.write(self._orders(rendezvous, rank))
        if self._killed:  # meanwhile
            self.kill()

    def kill(self) -> None:
        self._killed = True
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()

    async def gone(self) -> None:
        if self._waiting:
            _, left = await asyncio.wait(self._waiting, timeout=GONE_SECONDS)
            if left:
                log.error("%d killed processes are still there", len(left))
        self.remove_folder()

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def readings(self) -> dict[int, Reading]:
        return {rank: self._board.read(rank) for rank in self.ranks}

    def pid(self, rank: int) -> int | None:
        process = self._processes.get(rank)
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
        }
        return json.dumps(orders).encode() + b"\n"


async def _report_exit(process: Process, rank: int, on_exit: OnExit) -> None:
    code = await process.wait()
    on_exit(rank, describe_exit(code), code < 0)


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = "; it may have run out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _environment(towards: str) -> dict[str, str]:
    """Ours, with gloo bound to the interface through which the other ranks are reached.

    Left alone it binds to whatever the host's name resolves to, which others may not reach, if it resolves.
    """
    interface = interface_of(local_address(towards))
    chosen = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    if interface and not local_address(towards).startswith("127."):
        chosen["NCCL_SOCKET_IFNAME"] = interface
    return chosen | os.environ


def local_address(towards: str) -> str:
    """This host's address on connections to `towards`; empty if there is no way there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # sends nothing
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The network interface with this IPv4 address; empty if there is none or the system does not tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
