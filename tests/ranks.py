"""Functions on several ranks: real processes that meet over gloo or NCCL, kept for many cases.

    def whole_sum(rank, x):                       # at module level, so that it can be sent
        groups = rank.groups(dp_size=2, ep_size=2)
        return groups.world.all_reduce(x)

    def test_sum(ranks):
        assert ranks(2).run(whole_sum, torch.ones(3))[0] ...

The processes are forked from a server that has torch and turnout imported, hence start in milliseconds.
Groups are kept from case to case and made again only where the sizes differ. A rank that fails, dies or
takes too long ends all of its pool, which starts again when next used.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from turnout.config import Launched
from turnout.parallel.groups import Groups, connect, disconnect
from turnout.parallel.topology import Topology

PRELOAD = [
    "torch",
    "torch.distributed",
    "turnout.moe",
    "turnout.engine.core",
    "turnout.kernels.cpu.attention",
    "turnout.kernels.cpu.experts",
    "turnout.parallel.groups",
]
GRACE = 0.5  # seconds for the others to answer once a rank has failed

context = multiprocessing.get_context("forkserver")


@dataclass
class Rank:
    """What a function gets as its first argument: which rank it runs on, and how to meet the others.

    folder: empty and shared by all ranks of this run, for files.
    """

    number: int
    size: int
    folder: Path
    _pool: Path
    _made: tuple[tuple[Topology, str, bool], Groups] | None = field(default=None, repr=False)
    _meetings: Any = field(default_factory=itertools.count, repr=False)

    def topology(self, **sizes: Any) -> Topology:
        """Of all ranks of the pool, with this one's place; data-parallel attention as dp_size has it."""
        sizes.setdefault("enable_dp_attention", sizes.get("dp_size", 1) > 1)
        return Topology(tp_size=self.size, rank=self.number, **sizes)

    def groups(self, device: str = "cpu", *, shared_memory: bool = True, **sizes: Any) -> Groups:
        """The groups of `topology(**sizes)`; collective. "cuda": every rank takes the GPU of its number."""
        wanted = (self.topology(**sizes), device, shared_memory)
        if self._made is None or self._made[0] != wanted:
            disconnect()
            place = torch.device(device, self.number) if device == "cuda" else torch.device(device)
            if device == "cuda":
                torch.cuda.set_device(place)
            store = self._pool / f"meeting-{next(self._meetings)}"
            found = connect(
                wanted[0],
                init_method=f"file://{store}",
                device=place,
                timeout=60,
                shared_memory=shared_memory,
            )
            self._made = wanted, found
        return self._made[1]

    def leave(self) -> None:
        """Leave the groups, for code that makes its own."""
        disconnect()
        self._made = None

    def launched(self) -> Launched:
        """As whom an engine on every rank is to start; leaves the groups."""
        self.leave()
        join = f"file://{self.folder}/join"
        return Launched(rank=self.number, size=self.size, ranks_per_node=self.size, init_method=join)


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """A running process of `function`, forked from the server that has PRELOAD imported."""
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


class RankFailed(Exception):
    """A rank died, did not answer in time, or raised what cannot be sent."""


class RankPool:
    """`size` processes that wait for functions to run together; started by the first `run`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = Path()
        self._runs = itertools.count()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """`function(rank, *args)` on every rank; what each returned, by rank.

        Function, arguments and results are pickled. Raises what the first rank to fail raised, with a
        note that names the rank, or RankFailed.
        """
        if not self._ranks:
            self._start()
        folder = self._folder / f"run-{next(self._runs)}"
        folder.mkdir()
        order = pickle.dumps((folder, function, args))
        try:
            for _, pipe in self._ranks:
                pipe.send_bytes(order)
            answers = self._collect(time.monotonic() + timeout, timeout)
        except BaseException:
            self.close()
            raise
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End all ranks, whatever they are doing."""
        for process, pipe in self._ranks:
            process.kill()
            pipe.close()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="turnout-ranks-"))
        for number in range(self.size):
            mine, theirs = context.Pipe()
            process = forked(_serve, number, self.size, self._folder, theirs)
            theirs.close()
            self._ranks.append((process, mine))

    def _collect(self, deadline: float, timeout: float) -> dict[int, Any]:
        """Everyone's answers; raises as soon as a rank has failed, after GRACE for the rank at fault."""
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        answers: dict[int, Any] = {}
        failures: dict[int, BaseException] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and not failures:
                failures[-1] = RankFailed(f"rank(s) {sorted(waiting.values())} silent after {timeout:g} s")
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    good, answer = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    good, answer = False, RankFailed(f"rank {rank} died")
                if good:
                    answers[rank] = answer
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE)
                failures[rank] = answer
        # A rank whose peer is gone fails too, by its connection: what else there is tells more.
        causes = sorted(
            failures.values(), key=lambda e: isinstance(e, ConnectionError) or "Connection" in str(e)
        )
        if causes:
            raise causes[0]
        return answers


def _serve(number: int, size: int, pool: Path, pipe: Connection) -> None:
    """One rank's life: functions one after another, until the pool closes the pipe."""
    torch.set_num_threads(1)
    rank = Rank(number=number, size=size, folder=pool, _pool=pool)
    with contextlib.suppress(EOFError):
        while True:
            rank.folder, function, args = pickle.loads(pipe.recv_bytes())
            try:
                answer = pickle.dumps((True, function(rank, *args)))
            except BaseException as error:
                answer = _failure(number, error)
            pipe.send_bytes(answer)


def _failure(number: int, error: BaseException) -> bytes:
    where = f"on rank {number}:\n{''.join(traceback.format_exception(error))}"
    try:
        error.add_note(where)
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((False, RankFailed(where)))
    return answer


class Pools:
    """Pools by size: `pools(4)` is the one of four ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __call__(self, size: int) -> RankPool:
        return self._pools.setdefault(size, RankPool(size))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
