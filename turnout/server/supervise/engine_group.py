"""One start of the group of ranks: from its processes' start until they are told to stop, or one fails.

The ranks run in processes of their own, so that Python code of the HTTP side never delays a step and this
process needs no torch. Two ZeroMQ sockets carry messages.py: a ROUTER that names the rank it commands, and a
PULL for what they all report. A rank that fails takes the group with it: the others wait for it in some
collective, and nothing but their end gets them out of there. What becomes of requests is the ledger's matter.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import zmq

from turnout.config import ServerConfig
from turnout.engine.messages import (
    Abort,
    AddRequest,
    Command,
    EngineStats,
    Event,
    Failed,
    Outputs,
    Profiled,
    Ready,
    RequestOutput,
    ResetPrefixCache,
    Shutdown,
    StartProfile,
    StopProfile,
    Wake,
    encoder,
    event_decoder,
)
from turnout.errors import UserError
from turnout.parallel.health import Reading
from turnout.parallel.topology import Topology
from turnout.server.supervise.admission import Admission
from turnout.server.supervise.dp_router import KNOWN_PAGES, Router
from turnout.server.supervise.ledger import EngineFailed
from turnout.server.supervise.local_ranks import Host, Rendezvous
from turnout.server.supervise.secret import admit_ranks_only, curve_keys
from turnout.server.supervise.watchdog import Stall, Watchdog, circumstances

LAST_WORDS_SECONDS = 0.5  # how long an ended process's messages may still be on their way
ECHO_SECONDS = 0.3  # how long after a rank's complaint the death it complains of may become known
FAR_ECHO_SECONDS = 1.5  # the same, where ranks on other hosts tell of deaths over a network
STOP_SECONDS = 5.0
LOOK_SECONDS = 0.25  # between looks at the board
LOST_SECONDS = 5.0  # how long after a rank could not be told something its end may become known
UNREACHED_SECONDS = 0.01  # between attempts to reach a rank whose connection is being made

log = logging.getLogger("turnout.server")


Receiver = Callable[[RequestOutput], None]


class EngineGroup:
    """Requests go in through `submit`; each one's outputs come back through its receiver, in order."""

    def __init__(
        self, config: ServerConfig, hosts: Sequence[Host], rendezvous: Rendezvous, secret: bytes = b""
    ):
        """secret: what ranks must hold to connect, see secret.py; none where only this user's can."""
        self.rendezvous = rendezvous
        self.topology = Topology.of(config)
        self.ready: Ready | None = None  # rank 0's, once all are
        self.stats: dict[int, EngineStats] = {}
        self.expert_tokens: dict[int, list[list[int]]] = {}  # by rank, each [layer][expert]
        self.failure: EngineFailed | None = None
        self.ended: dict[int, str] = {}  # ranks that are no more, and how they went
        self.heard = time.monotonic()
        self.watchdog = Watchdog(config.watchdog_timeout)
        self._config = config
        self._hosts = hosts
        self._host_of = {rank: host for host in hosts for rank in host.ranks}
        self._receivers: dict[str, Receiver] = {}
        known = 0 if config.disable_prefix_cache else KNOWN_PAGES
        self._router = Router(config.dp_size, config.page_size, known_pages=known)
        self._admissions: list[Admission] = []  # by data-parallel rank, once all are ready
        self._announced: dict[int, Ready] = {}
        self._killed: set[int] = set()  # by a signal, which did not come from here
        self._unreached: set[int] = set()  # ranks that could not be told something
        self._to_wake: set[int] = set()  # ranks, when this turn of the event loop is over
        self._reports = Counter[int]()  # of each rank, as many as have come
        self.profiling = False
        self._profiled: dict[int, bytes] = {}  # traces that have come, by rank
        self._traces: asyncio.Future[list[bytes]] | None = None
        self._said: list[Failed] = []
        self._verdict: EngineFailed | None = None
        self._news = asyncio.Event()  # something of the two above, or the end or loss of a rank
        self._stopping = self._ending = False
        self._context = zmq.Context()
        self._secret = secret
        self._authenticator = admit_ranks_only(self._context, secret) if secret else None
        # Queues are bounded by the number of requests admitted, not by message counts.
        self._commands = self._socket(zmq.ROUTER, rendezvous.commands)
        self._commands.router_mandatory = True
        self._events = self._socket(zmq.PULL, rendezvous.events)

    @property
    def serving(self) -> bool:
        """Whether requests may be submitted."""
        return self.ready is not None and self.failure is None and not self._stopping

    @property
    def busy(self) -> bool:
        """Whether there are requests that are not finished."""
        return bool(self._receivers)

    def computed(self) -> list[str]:
        """Ids of the requests that may be in the present step."""
        return [id for admission in self._admissions for id in admission.admitted]

    def pid(self, rank: int) -> int | None:
        return self._host_of[rank].pid(rank)

    def reading(self, rank: int) -> Reading:
        """What `rank` does, as far as known."""
        return self._host_of[rank].readings().get(rank, Reading())

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Start the ranks and pass their events on until all have ended. Raises EngineFailed unless stopped;
        then `failure` tells of a rank that was killed before it could leave.

        When this returns or raises, no process is left, and no request gets anything more.
        """
        loop = asyncio.get_running_loop()
        descriptor = self._events.fileno()
        loop.add_reader(descriptor, self._on_events)
        watching = asyncio.create_task(self._watch(on_ready))
        news = asyncio.create_task(self._news.wait())
        try:
            for host in self._hosts:
                await host.start(self.rendezvous, self._on_exit)
            await asyncio.wait({news, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            if not self._stopping:
                self.failure = await self._cause()
                raise self.failure
            await self._all_ended(STOP_SECONDS)
            self.failure = self._death()
        finally:
            watching.cancel()
            news.cancel()
            if self._traces and not self._traces.done():
                self._traces.set_exception(
                    EngineFailed("the ranks ended before they sent what they recorded")
                )
            self.kill()
            await asyncio.gather(*(host.gone() for host in self._hosts))
            loop.remove_reader(descriptor)
            self._close_sockets()

    def submit(self, request: AddRequest, receiver: Receiver) -> None:
        """Generate; `receiver` is called for every output. The group must be serving."""
        self._receivers[request.id] = receiver
        left = request.sampling.max_tokens - len(request.output_ids)
        dp_rank = self._router.place(request.id, request.prompt_ids, left, request.cache_salt)
        by_priority = self._config.scheduling_policy == "priority"
        self._admissions[dp_rank].add(request.id, request.priority if by_priority else 0)
        owners = self._sharing(dp_rank)
        self._tell(owners, request)
        self._wake(rank for rank in range(self.topology.tp_size) if rank not in owners)

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; those unknown or finished are ignored."""
        by_rank: dict[int, list[str]] = {}
        for id in ids:
            if self._receivers.pop(id, None) is not None:
                by_rank.setdefault(self._router.rank_of(id), []).append(id)
                self._forget(id, complete=False)
        for dp_rank, of_rank in by_rank.items():
            self._tell(self._sharing(dp_rank), Abort(of_rank))

    def reset_prefix_cache(self) -> None:
        """Tell all ranks to forget the prefixes that they could reuse. The group must be serving."""
        self._router.forget_prefixes()
        self._tell(range(self.topology.tp_size), ResetPrefixCache())

    def start_profile(self, command: StartProfile) -> None:
        """Let all ranks record what they do. The group must be serving."""
        self.profiling = True
        self._tell(range(self.topology.tp_size), command)

    async def stop_profile(self) -> list[bytes]:
        """What each rank has recorded since `start_profile`, see `Profiled`. Raises EngineFailed if a rank
        ends before it has sent that."""
        self.profiling = False
        self._traces = asyncio.get_running_loop().create_future()
        self._profiled.clear()
        self._tell(range(self.topology.tp_size), StopProfile())
        return await self._traces

    def stop(self) -> None:
        """End the ranks, gently if they listen. `run` returns."""
        self._stopping = True
        if self.ready is None:  # still loading, and deaf
            self.kill()
        else:
            self._tell(range(self.topology.tp_size), Shutdown())
        self._news.set()

    def fail(self, failure: EngineFailed) -> None:
        """End the group for a reason that its ranks do not know."""
        self._verdict = self._verdict or failure
        self._news.set()

    def kill(self) -> None:
        self._ending = True
        for host in self._hosts:
            host.kill()

    def _sharing(self, dp_rank: int) -> range:
        """The ranks that share the requests of `dp_rank`: all get the same commands in the same order."""
        size = self.topology.attention_tp
        return range(dp_rank * size, (dp_rank + 1) * size)

    def _wake(self, ranks: Iterable[int]) -> None:
        """Let these ranks step, by one message for all requests that begin in this turn of the event loop.
        Not before the last of these is on its way: who wakes and finds no work sleeps again."""
        ranks = set(ranks)
        if ranks and not self._to_wake:
            asyncio.get_running_loop().call_soon(self._send_wakes)
        self._to_wake |= ranks

    def _send_wakes(self) -> None:
        ranks, self._to_wake = sorted(self._to_wake), set()
        if self.serving:
            self._tell(ranks, Wake())

    def _socket(self, kind: int, address: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        if self._secret:
            socket.curve_server = True
            socket.curve_secretkey = curve_keys(self._secret, "head")[1].encode()
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise UserError(f"cannot listen on {address}: {error.strerror}; see --dist-init-addr") from None
        return socket

    def _close_sockets(self) -> None:
        if self._authenticator:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _tell(self, ranks: Iterable[int], command: Command) -> None:
        payload = encoder.encode(command)
        for rank in ranks:
            try:
                self._send(rank, payload)
            except zmq.ZMQError:  # the process has ended, as `run` is about to find, or just its connection
                self._unreached.add(rank)
                self._news.set()

    def _send(self, rank: int, payload: bytes) -> None:
        """Raises ZMQError if there is no connection to `rank`."""
        self._commands.send_multipart([self.rendezvous.identity(rank).encode(), payload], zmq.NOBLOCK)

    async def _all_ended(self, seconds: float) -> None:
        """Wait until every rank has ended, but no longer than that."""
        deadline = time.monotonic() + seconds
        while len(self.ended) < self.topology.tp_size and (left := deadline - time.monotonic()) > 0:
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)

    def _death(self) -> EngineFailed | None:
        """How the first rank went that was killed, if one was."""
        for rank in self._killed:
            return EngineFailed(f"{self._name(rank)} {self.ended[rank]}{self._circumstances(rank)}")
        return None

    async def _cause(self) -> EngineFailed:
        """Why the group fails. Of what ranks say and how they end, the first may be an echo.

        A rank killed by a signal says nothing, nor does one that leaves in the middle of something, but the
        others complain that they lost it, perhaps before its parent knows. One that ends by itself may have
        said why, in a message still on its way.
        """
        start = time.monotonic()
        echo = ECHO_SECONDS if len(self._hosts) == 1 else FAR_ECHO_SECONDS
        while True:
            waited = time.monotonic() - start
            if self._verdict:
                return self._verdict
            for said in self._said:
                if said.user_error:
                    return EngineFailed(said.message, user_error=True, spoken=True)
            spoken = {said.rank for said in self._said}
            silent = [rank for rank in self.ended if rank not in spoken]
            killed = [rank for rank in silent if rank in self._killed]
            if killed or (silent and waited >= LAST_WORDS_SECONDS):
                rank = (killed or silent)[0]
                return EngineFailed(f"{self._name(rank)} {self.ended[rank]}{self._circumstances(rank)}")
            if self._said and not silent and waited >= echo:
                said = self._said[0]
                return EngineFailed(f"{said.message}{self._circumstances(said.rank)}", spoken=True)
            if self._unreached and not silent and waited >= LOST_SECONDS:
                rank = min(self._unreached)
                return EngineFailed(f"{self._name(rank)} cannot be reached{self._circumstances(rank)}")
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), ECHO_SECONDS / 3)

    def _circumstances(self, rank: int) -> str:
        """Where `rank` is and what it was doing, and which rank waited for it."""
        readings = {other: self.reading(other) for other in self._host_of}
        return circumstances(rank, readings, self._host_of[rank].where, steps=self.ready is not None)

    def _name(self, rank: int) -> str:
        return f"rank {rank}" if self.topology.tp_size > 1 else "the engine process"

    def _on_exit(self, rank: int, how: str, by_signal: bool) -> None:
        self.ended[rank] = how
        if by_signal and not self._ending:
            self._killed.add(rank)
        self._news.set()

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
            self._announced[event.rank] = event
        elif isinstance(event, Profiled):
            self._profiled[event.rank] = event.trace
            if len(self._profiled) == self.topology.tp_size and self._traces and not self._traces.done():
                self._traces.set_result([self._profiled[rank] for rank in range(self.topology.tp_size)])
        else:
            self._said.append(event)
            self._news.set()

    def _deliver(self, event: Outputs) -> None:
        stats = event.stats
        if event.number != self._reports[stats.rank]:  # nothing of this rank counts any more
            return self.fail(self._lost(stats.rank))
        self._reports[stats.rank] += 1
        self.stats[stats.rank] = stats
        if stats.expert_tokens is not None:
            self.expert_tokens[stats.rank] = stats.expert_tokens
        for output in event.outputs:
            receiver = self._receivers.get(output.id)
            if receiver is None:  # aborted while this was on its way
                continue
            self._router.produced(output.id, len(output.token_ids))
            if output.finish_reason is not None:
                del self._receivers[output.id]
                self._forget(output.id, complete=output.finish_reason in ("stop", "length"))
            receiver(output)

    def _forget(self, id: str, *, complete: bool) -> None:
        """The request `id` needs nothing more. complete: see Router."""
        self._admissions[self._router.rank_of(id)].remove(id)
        self._router.finished(id, complete=complete)

    async def _watch(self, on_ready: Callable[[], None]) -> None:
        """Wait for all ranks to be ready, then for one to stall."""
        deadline = time.monotonic() + self._config.startup_timeout
        look_at = 0.0
        while len(self._announced) < self.topology.tp_size:
            await asyncio.sleep(UNREACHED_SECONDS)
            if (now := time.monotonic()) > deadline:
                return self.fail(self._late())
            if now >= look_at:
                look_at = now + LOOK_SECONDS
                if stall := self._look(busy=True):
                    return self.fail(self._stalled(stall))
        for rank in range(self.topology.tp_size):
            await self._reach(rank)
        self.ready = self._announced[0]
        running = self.ready.info["config"]["max_running_requests"]
        self._admissions = [Admission(running) for _ in range(self.topology.dp_size)]
        on_ready()
        while True:
            if stall := self._look(busy=self.busy):
                return self.fail(self._stalled(stall))
            await asyncio.sleep(LOOK_SECONDS)

    def _stalled(self, stall: Stall) -> EngineFailed:
        return EngineFailed(f"{stall}{self._circumstances(stall.rank)}")

    def _lost(self, rank: int) -> EngineFailed:
        lost = f"message {self._reports[rank]} of {self._name(rank)} was lost on its way to the server"
        return EngineFailed(f"{lost}{self._circumstances(rank)}")

    def _look(self, *, busy: bool) -> Stall | None:
        readings = {rank: reading for host in self._hosts for rank, reading in host.readings().items()}
        return self.watchdog.look(time.monotonic(), readings, busy=busy)

    async def _reach(self, rank: int) -> None:
        """Return once `rank` can be told something: its two connections may come up in either order."""
        while True:
            try:
                self._send(rank, encoder.encode(Wake()))
                return
            except zmq.ZMQError:
                await asyncio.sleep(UNREACHED_SECONDS)

    def _late(self) -> EngineFailed:
        absent = [rank for rank in range(self.topology.tp_size) if rank not in self._announced]
        who = f" (ranks {absent} are missing)" if self.topology.tp_size > 1 else ""
        seconds = self._config.startup_timeout
        return EngineFailed(
            f"the engine did not load within --startup-timeout {seconds:g} s{who}", user_error=True
        )
