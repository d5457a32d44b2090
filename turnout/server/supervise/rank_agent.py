"""`turnout rank`: ranks that dial in to a head, wherever and however they were started, and serve it.

0  the head, or a signal, told it to leave   1  the head failed
2  a user error: the head cannot be reached, or refuses this rank

Each runs the ordinary rank process when told to, and again for each start of the group. If its connection
ends, the process ends too, and the rank dials in again. Those of one `turnout rank` share a fork server: its
imports, and the weights that it keeps, are there once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnout.cache import place_temporary_files
from turnout.checkpoint.fingerprint import fingerprint
from turnout.checkpoint.locate import locate, require_folder
from turnout.config import ServerConfig
from turnout.engine.fork_server import ForkServer
from turnout.engine.ranks.local_launcher import rank_environment, stop_signals
from turnout.errors import UserError
from turnout.parallel.health import Reading
from turnout.parallel.topology import split_address
from turnout.server.supervise import rank_protocol
from turnout.server.supervise.local_ranks import LocalRanks
from turnout.server.supervise.rank_protocol import HEAD_SILENT_SECONDS
from turnout.server.supervise.secret import LONGEST_LINE, Channel, Rejected, within

RETRY_SECONDS = 0.5
# A process that is stopped keeps its connections: its system goes on taking what is sent there.
HEAD_SILENT = f"it has not been heard for {HEAD_SILENT_SECONDS:g} s, as if it were stopped"
# How launchers number the processes that they start: torchrun, Slurm, Open MPI, MPICH; and Kubernetes'
# LeaderWorkerSet its pods.
ORDERS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LWS_WORKER_INDEX")
LOCAL_ORDERS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")

log = logging.getLogger("turnout.server")


class RankAgent:
    """One rank."""

    def __init__(
        self,
        head: str,
        secret: bytes,
        hello: rank_protocol.Hello,
        fork_server: ForkServer,
        *,
        own: Mapping[str, Any],
        patience: float,
    ):
        """head: HOST:PORT. own: fields of Config that count here, whatever the head says. patience: seconds
        to wait for a head. Raises UserError."""
        address = split_address(head)
        if address is None:
            raise UserError(f"--head {head}: must be HOST:PORT, the --dist-init-addr of the head")
        self._head, self._address = head, address
        self._secret, self._hello, self._own, self._patience = secret, hello, own, patience
        self._ranks: LocalRanks | None = None
        self._fork_server = fork_server
        self._number = 0  # of the life that the head last began
        self._contact = time.monotonic()  # with the head, the last one

    async def run(self) -> int:
        """The exit code. Raises UserError."""
        waiting = ""  # why, as the log last said it
        while True:
            try:
                code = await self._connect()
            except OSError as error:
                code, why = None, error.strerror or str(error)
            except Rejected as rejection:
                if rejection.final:
                    raise UserError(f"the head at {self._head} cannot be served: {rejection}") from None
                code, why = None, str(rejection)
            else:
                why = "it closed the connection"
            if code is not None:
                return code
            if why != waiting:
                log.info("waiting for a head at %s: %s", self._head, why)
                waiting = why
            if time.monotonic() - self._contact > self._patience:
                raise UserError(
                    f"no head at {self._head} within {self._patience:g} s: {why}; start `turnout serve "
                    f"--dist-init-addr {self._head}` there, or correct --head"
                )
            await asyncio.sleep(RETRY_SECONDS)

    async def _connect(self) -> int | None:
        """One connection, until it ends; the exit code, or None to dial in again.

        Raises Rejected, UserError, OSError."""
        host, port = self._address
        async with _answering():  # else as long as the system tries, minutes
            reader, writer = await asyncio.open_connection(
                host, port, family=socket.AF_INET, limit=LONGEST_LINE
            )
        channel = reporting = None
        try:
            rank_protocol.notice_lost_host(writer)
            if not self._hello.gpus:  # else it is the head that says which of them its ranks see
                self._fork_server.prepare(rank_environment(writer.get_extra_info("peername")[0]))
            channel = await Channel.open(reader, writer, rank_protocol.to_rank, self._secret, is_head=False)
            await self._introduce(channel)
            reporting = asyncio.create_task(self._report(channel))
            return await self._serve(channel)
        except asyncio.CancelledError:
            if channel:
                channel.send(rank_protocol.Leaving("was told to stop"))
            raise
        finally:
            if reporting:
                reporting.cancel()
            with suppress(OSError):
                await writer.drain()
            writer.close()
            await self._end_process()

    async def _introduce(self, channel: Channel[rank_protocol.ToRank]) -> None:
        channel.send(self._hello)
        async with _answering():
            welcome = await channel.receive()
        if isinstance(welcome, rank_protocol.Refused):
            raise Rejected(welcome.reason)
        if isinstance(welcome, rank_protocol.Welcome):
            self._contact = time.monotonic()
            folder = locate(str(self._own.get("model", welcome.model)))
            require_folder(folder)
            channel.send(rank_protocol.Weights(await asyncio.to_thread(fingerprint, folder)))

    async def _serve(self, channel: Channel[rank_protocol.ToRank]) -> int | None:
        while True:
            async with within(HEAD_SILENT_SECONDS, HEAD_SILENT):
                message = await channel.receive()
            self._contact = time.monotonic()
            if message is None:
                return None
            if isinstance(message, rank_protocol.Refused):
                raise Rejected(message.reason)
            if isinstance(message, rank_protocol.Leave):
                if message.reason:
                    sys.stderr.write(f"error: the head failed: {message.reason}\n")
                return 1 if message.reason else 0
            if isinstance(message, rank_protocol.Start):
                await self._start_process(message, channel)
            elif isinstance(message, rank_protocol.Stop):
                if message.number == self._number:
                    await self._end_process()
                channel.send(rank_protocol.Gone(message.number))

    async def _start_process(
        self, start: rank_protocol.Start, channel: Channel[rank_protocol.ToRank]
    ) -> None:
        await self._end_process()
        number = self._number = start.rendezvous.number

        def on_exit(rank: int, how: str, by_signal: bool) -> None:
            channel.send(rank_protocol.Exited(number, how, by_signal))

        log.info("rank %d of %d starts", start.rank, start.config["tp_size"])
        config = replace(ServerConfig(**start.config), **self._own)
        environment = {"CUDA_VISIBLE_DEVICES": start.gpus} if start.gpus else {}
        self._ranks = LocalRanks(
            config,
            range(start.rank, start.rank + 1),
            self._fork_server,
            secret=self._secret,
            environment=environment,
        )
        await self._ranks.start(start.rendezvous, on_exit)

    async def _report(self, channel: Channel[rank_protocol.ToRank]) -> None:
        while True:
            pid, reading = 0, Reading()
            if self._ranks:
                (rank,) = self._ranks.ranks
                pid, reading = self._ranks.pid(rank) or 0, self._ranks.readings().get(rank, reading)
            channel.send(rank_protocol.Report(self._number, pid, reading))
            await asyncio.sleep(rank_protocol.REPORT_SECONDS)

    async def _end_process(self) -> None:
        if self._ranks:
            ranks, self._ranks = self._ranks, None
            ranks.kill()
            await ranks.gone()


def _answering() -> AbstractAsyncContextManager[None]:
    """Raises Rejected if what is inside takes too long."""
    return within(rank_protocol.SILENT_SECONDS, "it does not answer")


def hello(index: int = 0, count: int = 1) -> rank_protocol.Hello:
    """What the rank says that is `index` of `count` started together, as far as the environment tells."""
    order = _first_number(ORDERS)
    if order is not None:
        order = order * count + index
    gpus = visible_gpus()
    local = _first_number(LOCAL_ORDERS)
    if local is not None and count == 1 and local < len(gpus):
        gpus = (gpus[local],)
    return rank_protocol.Hello(socket.gethostname(), _machine(), order, gpus)


def visible_gpus() -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES names those that this process may use; torch-free."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return tuple(gpu.strip() for gpu in listed.split(",") if gpu.strip())
    return tuple(str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*")))))


async def serve_heads(
    head: str,
    secret: bytes,
    hellos: Sequence[rank_protocol.Hello],
    *,
    own: Mapping[str, Any],
    patience: float,
) -> int:
    """Be the ranks that say `hellos`, until they are told to leave; the highest exit code. Raises UserError.

    The arguments are those of `RankAgent`."""
    fork_server = ForkServer()
    agents = [RankAgent(head, secret, said, fork_server, own=own, patience=patience) for said in hellos]
    lives = [asyncio.create_task(agent.run()) for agent in agents]
    try:
        return max(await asyncio.gather(*lives))
    finally:
        for life in lives:
            life.cancel()
        await asyncio.wait(lives)
        fork_server.close()


async def until_signalled(served: Coroutine[Any, Any, int]) -> int:
    """The result of `serve_heads`; 0 if a signal ended it."""
    stop = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    lives = asyncio.create_task(served)
    lives.add_done_callback(lambda _: stop.set())
    await stop.wait()
    if lives.done():
        return lives.result()
    lives.cancel()
    await asyncio.wait([lives])
    return 0


def _machine() -> str:
    """The same for processes that can share memory and files."""
    place_temporary_files()
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [boot.read_text().strip() if boot.exists() else socket.gethostname()]
    for kind in ("pid", "ipc", "net"):
        with suppress(OSError):
            parts.append(str((Path("/proc/self/ns") / kind).readlink()))
    temporary = Path(tempfile.gettempdir()).stat()
    return " ".join([*parts, f"{temporary.st_dev}:{temporary.st_ino}"])


def _first_number(names: Sequence[str]) -> int | None:
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), None)
