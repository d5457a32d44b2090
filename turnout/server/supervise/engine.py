"""The engine as the server sees it, while its group of ranks may restart.

When a rank fails, the group restarts, which is the only way out of a collective that a rank has left.
Requests wait meanwhile, and then go on where they were (ledger.py). What ends the engine for good: a user
error while starting, a failure that a rank reports before anything was ever served (it would only happen
again), several failed starts in a row, or a failure while the server shuts down with all answers given.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from turnout.config import ServerConfig
from turnout.engine.fork_server import ForkServer
from turnout.engine.messages import AddRequest, EngineStats, Ready, RequestOutput, StartProfile
from turnout.errors import UserError
from turnout.parallel.health import Reading
from turnout.parallel.topology import Topology
from turnout.server.supervise.engine_group import EngineGroup
from turnout.server.supervise.ledger import EngineFailed, Entry, Ledger, Sink
from turnout.server.supervise.local_ranks import LocalRanks, Rendezvous
from turnout.server.supervise.rank_protocol import head_address
from turnout.server.supervise.remote_ranks import RemoteRank, RemoteRanks
from turnout.server.supervise.watchdog import STILL_SECONDS

MAX_FAILED_STARTS = 5  # in a row

log = logging.getLogger("turnout.server")


class EngineSupervisor:
    """Requests go in through `submit` while `accepting`."""

    def __init__(self, config: ServerConfig, secret: bytes = b"", fork_server: ForkServer | None = None):
        """secret: of ranks that are to dial in, if any are. fork_server: one that imports already."""
        self.config = config
        self._secret = secret
        self.ready: Ready | None = None  # what the ranks said when they were first ready
        self.failure: EngineFailed | None = None  # that ended it for good
        self._last_failure: EngineFailed | None = None
        self.restarts = 0
        self.started = asyncio.Event()  # set when first ready
        self.when_ready: list[Callable[[], None]] = []  # called whenever the ranks are ready
        self.ledger = Ledger(config.max_request_restarts, config.random_seed)
        self._reserved = 0  # places of sequences that are yet to be submitted
        self._group: EngineGroup | None = None
        self._local: LocalRanks | None = None
        self._fork_server = fork_server or ForkServer()
        self._others = RemoteRanks(config, secret)
        self._leaving = False
        self._told_to_stop = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Whether requests are being computed."""
        return self._group is not None and self._group.serving

    @property
    def accepting(self) -> bool:
        """Whether requests are taken: where they survive ranks, also while these restart."""
        waits = self.config.max_request_restarts > 0 and self.started.is_set() and self.failure is None
        return waits or self.serving

    @property
    def last_failure(self) -> EngineFailed | None:
        """Why the ranks had to restart, if they ever had to."""
        return (self._group and self._group.failure) or self._last_failure

    @property
    def num_requests(self) -> int:
        """Submitted and not finished."""
        return len(self.ledger)

    @property
    def stats(self) -> dict[int, EngineStats]:
        """Each rank's last report."""
        return self._group.stats if self._group else {}

    @property
    def expert_tokens(self) -> dict[int, list[list[int]]]:
        """By rank, each [layer][expert]."""
        return self._group.expert_tokens if self._group else {}

    @property
    def heard(self) -> float:
        """time.monotonic() of the last report."""
        return self._group.heard if self._group else time.monotonic()

    async def run(self) -> None:
        """Start the ranks, again if they fail, until `stop`. Raises EngineFailed when that is of no use,
        UserError if other ranks do not come. Requests that are left get the reason."""
        reason: str | None = None
        try:
            await self._others.open()
            await self._live()
        except (EngineFailed, UserError) as error:
            reason = str(error)
            self.failure = error if isinstance(error, EngineFailed) else EngineFailed(reason)
            self.ledger.fail(self.failure)
            raise
        finally:
            self._fork_server.close()
            await self._others.close(reason)

    async def _live(self) -> None:
        failed_starts = life = 0
        while (placed := await self._placed()) is not None:
            life += 1
            group = self._group = self._make_group(life, *placed)
            try:
                await group.run(self._on_ready)
                if self._told_to_stop.is_set():
                    if group.failure:  # whichever came first, it is told
                        raise group.failure
                    return
                self.ledger.park()
            except EngineFailed as failure:
                self._last_failure = failure
                served = group.ready is not None
                failed_starts = 0 if served else failed_starts + 1
                self._end_blamed(self.ledger.ranks_died(group.computed()), failure)
                if self._is_final(failure, served, failed_starts):
                    raise
                log.error("%s; the ranks restart, and %d requests wait", failure, len(self.ledger))
            finally:
                self._group = None
            self.restarts += 1

    async def _placed(self) -> tuple[ServerConfig, list[RemoteRank]] | None:
        """The ranks that dialled in, once enough have, see RemoteRanks; None if told to stop."""
        placed = asyncio.create_task(self._others.placed())
        stop = asyncio.create_task(self._told_to_stop.wait())
        await asyncio.wait({placed, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        placed.cancel()  # harmless if it is done
        return None if self._told_to_stop.is_set() else placed.result()

    async def reserve(self, count: int, room: int) -> int | None:
        """See interface.Engine."""
        return self.reserve_now(count, room)

    def reserve_now(self, count: int, room: int) -> int | None:
        """See interface.Engine.reserve."""
        present = self.num_requests + self._reserved
        if present + count > room:
            return present
        self._reserved += count
        return None

    def unreserve(self, count: int) -> None:
        """See interface.Engine."""
        self._reserved -= count

    def submit(self, request: AddRequest, sink: Sink) -> None:
        """See interface.Engine."""
        self._reserved = max(0, self._reserved - 1)
        self.ledger.add(request, sink)
        self._submit_due()

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; those unknown or finished are ignored."""
        ids = list(ids)
        if self._group:
            self._group.abort(ids)
        if self.ledger.abort(ids):
            self._submit_due()

    def reset_prefix_cache(self) -> None:
        """See EngineGroup; only while `serving`."""
        assert self._group is not None
        self._group.reset_prefix_cache()

    @property
    def profiling(self) -> bool:
        """Whether a profile was started whose traces were not asked for yet."""
        return self._group is not None and self._group.profiling

    def start_profile(self, command: StartProfile) -> None:
        """See EngineGroup; only while `serving`."""
        assert self._group is not None
        self._group.start_profile(command)

    async def stop_profile(self) -> list[bytes]:
        """See EngineGroup; only while `profiling`."""
        assert self._group is not None
        return await self._group.stop_profile()

    def restart(self) -> None:
        """Restart the ranks; requests wait meanwhile. The engine must be serving."""
        assert self._group is not None
        log.info("the ranks restart as they were told to, and %d requests wait", len(self.ledger))
        self._group.stop()

    def leave(self) -> None:
        """The server is about to stop: from now on a failure is the last."""
        self._leaving = True

    def stop(self) -> None:
        """End the ranks, gently if they listen. `run` returns."""
        self._leaving = True
        self._told_to_stop.set()
        if self._group:
            self._group.stop()

    def end_at_once(self) -> None:
        """Leave nothing behind on this host, without waiting; other hosts see the connection end."""
        if self._local:
            self._local.kill()
            self._local.remove_folder()

    def describe_ranks(self) -> list[dict[str, Any]]:
        """Each rank's place, process, state and counters; all but the experts', which /metrics has."""
        return [self._describe_rank(rank) for rank in range(self.config.tp_size)]

    def _describe_rank(self, rank: int) -> dict[str, Any]:
        topology, group = Topology.of(self.config, rank), self._group
        reading = group.reading(rank) if group else Reading()
        place = {
            "rank": rank,
            "dp_rank": topology.dp_rank,
            "ep_rank": topology.ep_rank,
            "pid": group.pid(rank) if group else None,
            "state": self._state(rank),
            "phase": reading.phase,
            "collectives": reading.collectives,
            "steps": 0,
        }
        stats = self.stats.get(rank)
        counters = msgspec.structs.asdict(stats) if stats else {}
        return place | {
            k: v for k, v in counters.items() if k not in ("rank", "pid", "state", "expert_tokens")
        }

    def _state(self, rank: int) -> str:
        group = self._group
        if group is None or group.ready is None:
            return "loading"
        if rank in group.ended:
            return "ended"
        if group.watchdog.silence(rank) > STILL_SECONDS:
            return "stalled"
        return "running" if group.busy else "idle"

    def _make_group(self, life: int, config: ServerConfig, remote: Sequence[RemoteRank]) -> EngineGroup:
        ranks = range(config.tp_size - len(remote))
        local = self._local = LocalRanks(config, ranks, self._fork_server, secret=self._secret)
        try:
            return EngineGroup(config, [local, *remote], self._rendezvous(life, local.folder), self._secret)
        except UserError:
            local.remove_folder()
            raise

    def _rendezvous(self, life: int, folder: Path) -> Rendezvous:
        if not self._secret:
            return Rendezvous(
                number=life,
                commands=f"ipc://{folder}/commands",
                events=f"ipc://{folder}/events",
                init_method=f"file://{folder}/join",
                waiting=len(self.ledger),
            )
        host, port = head_address(self.config)
        return Rendezvous(
            number=life,
            commands=f"tcp://{host}:{port + 2}",
            events=f"tcp://{host}:{port + 3}",
            init_method=f"tcp://{host}:{port + 1}",
            towards=host,
            waiting=len(self.ledger),
        )

    def _is_final(self, failure: EngineFailed, served: bool, failed_starts: int) -> bool:
        leaves = self._told_to_stop.is_set() or (self._leaving and not self.ledger)
        if leaves or failed_starts >= MAX_FAILED_STARTS:
            return True
        return not served and (failure.user_error or (failure.spoken and self.ready is None))

    def _on_ready(self) -> None:
        assert self._group is not None
        ready = self._group.ready
        if self.ready and ready and ready.vocab_size != self.ready.vocab_size:
            raise UserError(
                f"the model has {ready.vocab_size} token ids now, and had {self.ready.vocab_size} before: "
                "only its weights may change on disk; restart the server"
            )
        if self.restarts:
            log.info("the ranks are ready again, and %d requests go on", len(self.ledger))
        self.ready = ready
        if self._local:
            self._local.make_spares()
        self.started.set()
        for tell in self.when_ready:
            tell()
        self._submit_due()

    def _submit_due(self) -> None:
        group = self._group
        if group is None or not group.serving:
            return
        for entry in self.ledger.due():
            group.submit(entry.message(), partial(self._deliver, entry))

    def _deliver(self, entry: Entry, output: RequestOutput) -> None:
        more_due = self.ledger.delivered(entry, output)
        entry.sink(output)
        if more_due:
            self._submit_due()

    def _end_blamed(self, blamed: Sequence[Entry], failure: EngineFailed) -> None:
        for entry in blamed:
            if entry.strikes:
                log.error("request %s ends: the ranks died %d times over it", entry.request.id, entry.strikes)
                failure = EngineFailed(
                    f"the ranks died {entry.strikes} times over this request, the last time when no other "
                    f"could have been the reason: {failure}"
                )
            entry.sink(failure)
