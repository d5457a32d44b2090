"""The ranks that dial in, as the head sees them: who has come, what they could be, and what becomes of them.

Each has a connection of its own, on which it gets its orders and reports (rank_agent.py is the other side).
One that comes when all places are taken is a spare, for the next start of the group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace

from turnout.checkpoint.fingerprint import differences, fingerprint
from turnout.checkpoint.locate import locate
from turnout.config import Config, ServerConfig
from turnout.errors import UserError
from turnout.parallel.health import Reading
from turnout.parallel.topology import divisors
from turnout.server.supervise import rank_protocol
from turnout.server.supervise.local_ranks import GONE_SECONDS, OnExit, Rendezvous
from turnout.server.supervise.secret import LONGEST_LINE, Channel, Rejected

FAREWELL_SECONDS = 1.0
OVERDUE_SECONDS = 4 * rank_protocol.REPORT_SECONDS  # without a report, until a rank gets no place

log = logging.getLogger("turnout.server")


class RemoteRank:
    """A `Host` of one rank, for as long as its connection lasts."""

    def __init__(self, hello: rank_protocol.Hello, address: str, send: Callable[[object], None]):
        self.hello = hello
        self.ranks = range(0)
        self.where = f"{hello.host} ({address})"
        self.lost: str | None = None  # why its connection has ended, as "it ..."
        self._died = False
        self._send = send
        self._config: ServerConfig | None = None
        self._gpus = ""
        self._number = 0
        self._report = rank_protocol.Report(0, 0, Reading())
        self._heard = time.monotonic()
        self._gone = asyncio.Event()
        self._on_exit: OnExit | None = None

    def place(self, rank: int, config: ServerConfig, gpus: str) -> None:
        """What to be at the next start: `rank` of `config`, on a host whose ranks use `gpus`."""
        self.ranks, self._config, self._gpus = range(rank, rank + 1), config, gpus

    async def start(self, rendezvous: Rendezvous, on_exit: OnExit) -> None:
        names = [*(field.name for field in fields(Config)), *rank_protocol.SERVER_FIELDS]
        config = {name: getattr(self._config, name) for name in names}
        self._number, self._on_exit = rendezvous.number, on_exit
        self._gone.clear()
        if self.lost is not None:  # since it was placed
            self.lose(self.lost)
        self._send(rank_protocol.Start(self.ranks[0], rendezvous, config, self._gpus))

    def kill(self) -> None:
        self._send(rank_protocol.Stop(self._number))

    async def gone(self) -> None:
        if self._on_exit is None:  # never started
            return
        try:
            async with asyncio.timeout(GONE_SECONDS):
                await self._gone.wait()
        except TimeoutError:
            log.error("%s does not say that its rank has ended", self.where)
        self._on_exit = None

    def readings(self) -> dict[int, Reading]:
        """The last that came, also of one that is lost, to say what it did."""
        return {self.ranks[0]: self._report.reading} if self._report.number == self._number else {}

    def pid(self, rank: int) -> int | None:
        return self._report.pid if self._report.number == self._number and self._report.pid else None

    @property
    def speaks(self) -> bool:
        """Whether its reports come; its connection may outlive its host by SILENT_SECONDS."""
        return time.monotonic() - self._heard < OVERDUE_SECONDS

    def hear(self, message: rank_protocol.ToHead) -> None:
        self._heard = time.monotonic()
        if isinstance(message, rank_protocol.Leaving):
            self.lose(message.why, died=False)
        elif isinstance(message, rank_protocol.Report):
            self._report = message
        elif isinstance(message, rank_protocol.Exited):
            if message.number == self._number and self._on_exit:
                self._on_exit(self.ranks[0], message.how, message.by_signal)
        elif isinstance(message, rank_protocol.Gone) and message.number == self._number:
            self._gone.set()

    def lose(self, why: str, *, died: bool = True) -> None:
        """Its process is gone, or will be as soon as the other side notices. died: nothing told it to end."""
        if self.lost is None:
            self.lost, self._died = why, died
        if self._on_exit:
            self._on_exit(self.ranks[0], f"is lost: on {self.where} it {self.lost}", self._died)
        self._gone.set()


class RemoteRanks:
    """Lets ranks dial in at --dist-init-addr, if there are to be any."""

    def __init__(self, config: ServerConfig, secret: bytes):
        """secret: empty if no rank is to dial in."""
        self._config, self._secret = config, secret
        self._here: list[RemoteRank] = []  # in the order in which they came
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._channels: dict[asyncio.Task[None], Channel[rank_protocol.ToHead]] = {}
        self._refused = ""

    async def open(self) -> None:
        """Let ranks come. Raises UserError if the address cannot be had."""
        if not self._secret:
            return
        host, port = rank_protocol.head_address(self._config)
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=LONGEST_LINE)
        except OSError as error:
            raise UserError(
                f"--dist-init-addr {self._config.dist_init_addr}: cannot listen there: {error.strerror}; "
                "stop another head that does, or give an address of this host, and a port that is free with "
                f"the {rank_protocol.PORTS - 1} after it"
            ) from None

    async def placed(self) -> tuple[ServerConfig, list[RemoteRank]]:
        """The last ranks of the next start, all that do not run under this process, once enough have come;
        and the configuration with the number of their hosts. Raises UserError in the end."""
        if not self._secret:
            return self._config, []
        seconds, said = self._config.startup_timeout, ""
        try:
            async with asyncio.timeout(seconds):
                while (chosen := self._choose()) is None:
                    if (tally := self._tally()) != said:
                        log.info("waiting for ranks at %s: %s", self._config.dist_init_addr, tally)
                        said = tally
                    self._changed.clear()
                    with suppress(TimeoutError):  # one that was silent may have been heard meanwhile
                        async with asyncio.timeout(rank_protocol.REPORT_SECONDS):
                            await self._changed.wait()
        except TimeoutError:
            why = f" (refused: {self._refused})" if self._refused else ""
            raise UserError(
                f"not enough ranks came within --startup-timeout {seconds:g} s: {self._tally()}{why}; start "
                f"them with `turnout rank --head {self._config.dist_init_addr} --secret-file FILE`"
            ) from None
        nnodes, ranks = chosen
        config = replace(self._config, nnodes=nnodes)
        for place, rank in enumerate(ranks, start=config.tp_size - len(ranks)):
            together = [one.hello.gpus for one in ranks if one.hello.machine == rank.hello.machine]
            rank.place(place, config, "" if config.device == "cpu" else ",".join(share_gpus(together)))
        return config, ranks

    async def close(self, reason: str | None) -> None:
        """Send all ranks home."""
        for channel in self._channels.values():
            channel.send(rank_protocol.Leave(reason))
        if self._server:
            self._server.close()
        if self._channels:  # they end as the ranks hang up
            _, left = await asyncio.wait(self._channels, timeout=FAREWELL_SECONDS)
            for connection in left:
                connection.cancel()

    def _choose(self) -> tuple[int, list[RemoteRank]] | None:
        """On how many hosts the next start is, and its ranks that dialled in; None if more have to come."""
        config, there = self._config, self._there()
        if config.distributed_executor_backend == "mp":  # the ranks of the first host run under this process
            return on_hosts(there, config.nnodes - 1, config.tp_size // config.nnodes, config.nnodes)
        counts = [config.nnodes] if config.nnodes > 1 else divisors(config.tp_size)
        arranged = (on_hosts(there, count, config.tp_size // count, count) for count in counts)
        return next(filter(None, arranged), None)

    def _there(self) -> list[RemoteRank]:
        """The ranks that can be given a place. Those of a host that is lost are found to be lost one after
        the other, and the group would start with a spare one only to fail again."""
        return [rank for rank in self._here if rank.speaks]

    def _tally(self) -> str:
        config = self._config
        own = config.tp_size // config.nnodes if config.distributed_executor_backend == "mp" else 0
        hosts = Counter(rank.where for rank in self._there())
        there = ", ".join(f"{count} on {where}" for where, count in hosts.items()) or "none"
        return f"{hosts.total()} of {config.tp_size - own}, as many on each host ({there})"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")[0]
        channel = None
        try:
            rank_protocol.notice_lost_host(writer)
            channel = await Channel.open(reader, writer, rank_protocol.to_head, self._secret, is_head=True)
            await self._serve(channel, address)
        except Rejected as rejection:
            log.warning("refused a connection from %s: %s", address, rejection)
            self._refused = f"{address}: {rejection}"
            if channel:
                channel.send(rank_protocol.Refused(str(rejection)))
        except OSError as error:
            log.debug("a connection from %s ended before it was one of a rank: %s", address, error)
        finally:
            writer.close()

    async def _serve(self, channel: Channel[rank_protocol.ToHead], address: str) -> None:
        """A connection from its first words on. Raises Rejected, OSError."""
        async with asyncio.timeout(rank_protocol.SILENT_SECONDS):
            hello = await channel.receive()
        if not isinstance(hello, rank_protocol.Hello):
            return
        channel.send(rank_protocol.Welcome(self._config.model))
        alive = asyncio.create_task(_keep_in_touch(channel))
        try:
            await self._serve_welcome(channel, hello, address)
        finally:
            alive.cancel()

    async def _serve_welcome(
        self, channel: Channel[rank_protocol.ToHead], hello: rank_protocol.Hello, address: str
    ) -> None:
        """A connection from its Welcome on. Raises Rejected, OSError."""
        ours = asyncio.create_task(asyncio.to_thread(fingerprint, locate(self._config.model)))
        async with asyncio.timeout(self._config.startup_timeout):
            theirs = await channel.receive()
        if not isinstance(theirs, rank_protocol.Weights):
            return
        if differ := differences(await ours, theirs.files):
            raise Rejected(f"the model there is not the head's: {', '.join(differ)} differ")
        rank, connection = RemoteRank(hello, address, channel.send), asyncio.current_task()
        assert connection is not None
        log.info("a rank has come from %s", rank.where)
        self._channels[connection] = channel
        self._here.append(rank)
        self._changed.set()
        why = "closed its connection"
        try:
            while True:
                async with asyncio.timeout(rank_protocol.SILENT_SECONDS):
                    if (message := await channel.receive()) is None:
                        break
                rank.hear(message)
        except TimeoutError:
            why = f"has not been heard for {rank_protocol.SILENT_SECONDS:g} s"
        except ConnectionResetError:
            pass  # its process was killed with messages that it had not read
        except OSError as error:
            why = f"cannot be reached any more ({error.strerror})"
        finally:
            del self._channels[connection]
            self._here.remove(rank)
            rank.lose(why)


async def _keep_in_touch(channel: Channel[rank_protocol.ToHead]) -> None:
    """Let the other side know that this process runs."""
    while True:
        channel.send(rank_protocol.Alive())
        await asyncio.sleep(rank_protocol.ALIVE_SECONDS)


def on_hosts(
    ranks: Sequence[RemoteRank], hosts: int, per_host: int, nnodes: int
) -> tuple[int, list[RemoteRank]] | None:
    """`nnodes`, and `per_host` of `ranks` on each of `hosts` machines, host by host; None if there are not so
    many. Those that their starter numbered come first, in that order, then the others as they came."""

    def order(rank: RemoteRank) -> float:
        return float("inf") if rank.hello.order is None else rank.hello.order

    by_machine: dict[str, list[RemoteRank]] = {}
    for rank in sorted(ranks, key=order):
        by_machine.setdefault(rank.hello.machine, []).append(rank)
    full = [members[:per_host] for members in by_machine.values() if len(members) >= per_host]
    return (nnodes, [rank for members in full[:hosts] for rank in members]) if len(full) >= hosts else None


def share_gpus(allowed: Sequence[Sequence[str]]) -> list[str]:
    """A GPU for each rank of one host, from those that it may use; none at all if that is not possible."""
    taken: dict[int, str] = {}
    for rank in sorted(range(len(allowed)), key=lambda rank: len(allowed[rank])):  # the least free one first
        free = [gpu for gpu in allowed[rank] if gpu not in taken.values()]
        if not free:
            return []
        taken[rank] = free[0]
    return [taken[rank] for rank in range(len(allowed))]
