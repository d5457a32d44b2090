"""The ranks of one small model, in real processes that meet over gloo; the test is their server.

with Cluster(ranks(4), folder, model, dp_size=4, ep_size=4) as cluster:
    cluster.add("a", prompt, dp_rank=2, max_tokens=8)
    cluster.wait({"a"})
    cluster.outputs["a"].token_ids
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from tests.engine.toy import merge
from tests.ranks import Rank, RankPool
from turnout.config import Config
from turnout.engine.builder import build_engine
from turnout.engine.engine_plan import resolve
from turnout.engine.messages import (
    Abort,
    AddRequest,
    Command,
    EngineStats,
    Event,
    Outputs,
    Ready,
    RequestOutput,
    Shutdown,
    Wake,
    encoder,
    event_decoder,
)
from turnout.engine.profiling import Profiler
from turnout.engine.ranks.step_sync import StepSync
from turnout.engine.sampling import greedy
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.worker import run
from turnout.parallel.exchange import SharedExchange
from turnout.parallel.health import Unwatched

SMALL = {
    "device": "cpu",
    "dtype": "float32",
    "page_size": 4,
    "max_running_requests": 8,
    "chunked_prefill_size": 16,
    "max_prefill_tokens": 32,
    "max_total_tokens": 1024,
    "num_threads": 1,
    "load_progress": False,
}


class Counting(StepSync):
    """settled: close calls of all ranks so far."""

    settled = 0

    def next_near_tie(self, length: int) -> tuple[int, int]:
        found = super().next_near_tie(length)
        self.settled += found[1] > 0
        return found


def serve(rank: Rank, config: Config, folder: Path, close: float) -> int:
    """One rank, from its weights to Shutdown, with the loop of the engine process; how many calls were close.

    close: which gap makes a near-tie, see `greedy.CLOSE`.
    """
    greedy.CLOSE = close
    groups = rank.groups(dp_size=config.dp_size, ep_size=config.ep_size)
    step_sync = Counting(groups.topology, SharedExchange(rank.folder / "steps", rank.number, rank.size))
    core = build_engine(resolve(config, rank=rank.number), groups=groups, step_sync=step_sync)
    context = zmq.Context()
    commands, events = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    commands.identity = _name(rank.number)
    commands.connect(f"ipc://{folder}/commands")
    events.connect(f"ipc://{folder}/events")
    commands.send(b"here")

    def send(event: Event) -> None:
        events.send(encoder.encode(event))

    try:
        send(Ready(rank=rank.number, info={}, max_context=0, vocab_size=0))
        run(core, step_sync, commands, send, Profiler(step_sync.topology.rank, Unwatched()))
        return step_sync.settled
    finally:
        context.destroy(linger=1000)


class Cluster:
    """outputs: each request's so far, merged into one. stats: the last of each rank.

    settled: how many calls were close, known in the end.
    """

    def __init__(
        self,
        pool: RankPool,
        folder: Path,
        model: Path,
        *,
        close: float = greedy.CLOSE,
        timeout: float = 300,
        **flags: Any,
    ):
        self.config = Config(
            model=str(model),
            tp_size=pool.size,
            enable_dp_attention=flags.get("dp_size", 1) > 1,
            **(SMALL | flags),
        )
        self.outputs: dict[str, RequestOutput] = {}
        self.stats: dict[int, EngineStats] = {}
        self.settled = 0
        self._groups: dict[str, range] = {}  # request -> ranks that share it
        self._failure: BaseException | None = None
        self._reports = Counter[int]()  # of each rank, as many as have come
        self._context = zmq.Context()
        self._commands = self._bind(zmq.ROUTER, folder, "commands")
        self._commands.router_mandatory = True  # fail rather than drop
        self._events = self._bind(zmq.PULL, folder, "events")
        self._thread = threading.Thread(target=self._live, args=(pool, folder, close, timeout), daemon=True)

    def __enter__(self) -> Cluster:
        self._thread.start()
        for _ in range(self.config.tp_size):
            while not self._commands.poll(100):
                self._check()
            self._commands.recv_multipart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._shut_down()
        finally:
            self._context.destroy(linger=0)  # an open one would block whoever collects it
        self._check()

    def add(self, id: str, prompt: list[int], *, dp_rank: int = 0, lag: float = 0, **sampling: Any) -> None:
        """Give a request to the ranks of one data-parallel group, each `lag` seconds after the one before."""
        stride = self.config.tp_size // self.config.dp_size
        self._groups[id] = range(dp_rank * stride, (dp_rank + 1) * stride)
        message = AddRequest(id=id, prompt_ids=prompt, sampling=SamplingParams(**sampling))
        self.send(self._groups[id], message, lag)

    def abort(self, id: str, lag: float = 0) -> None:
        self.send(self._groups[id], Abort([id]), lag)

    def send(self, ranks: Iterable[int], command: Command, lag: float = 0) -> None:
        """To `ranks`, one after the other; the rest are woken, as the server does."""
        told = list(ranks)
        for rank in sorted(range(self.config.tp_size), key=lambda rank: rank not in told):
            if rank in told[1:]:
                time.sleep(lag)
            message = command if rank in told else Wake()
            try:
                self._commands.send_multipart([_name(rank), encoder.encode(message)])
            except zmq.ZMQError:  # no such rank any more: say why
                self._thread.join(20)
                self._check()
                raise

    def _shut_down(self) -> None:
        """Tell every rank; all leave once the first has heard, hence some before they are told."""
        with contextlib.suppress(zmq.ZMQError):
            for rank in range(self.config.tp_size):
                self._commands.send_multipart([_name(rank), encoder.encode(Shutdown())])
        self._thread.join(60)

    def wait(self, ids: Iterable[str], seconds: float = 30) -> None:
        """Until all of these have ended. Fails if a rank did, or if it takes too long."""
        deadline = time.monotonic() + seconds
        left = set(ids)
        while left:
            self.listen(0.1)
            left = {id for id in left if id not in self.outputs or not self.outputs[id].finish_reason}
            assert time.monotonic() < deadline, f"no end of {sorted(left)} in {seconds:g} s: {self.stats}"

    def listen(self, seconds: float = 0) -> None:
        """Take in what the ranks say, waiting for it at most `seconds`."""
        self._check()
        if not self._events.poll(int(1000 * seconds)):
            return
        while self._events.poll(0):
            event = event_decoder.decode(self._events.recv())
            if isinstance(event, Outputs):
                self._reports[event.stats.rank] += 1
                assert event.number == self._reports[event.stats.rank], "a message was lost"
                self.stats[event.stats.rank] = event.stats
                for output in event.outputs:
                    merge(self.outputs, output)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _bind(self, kind: int, folder: Path, name: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.bind(f"ipc://{folder}/{name}")
        return socket

    def _live(self, pool: RankPool, folder: Path, close: float, timeout: float) -> None:
        try:
            (self.settled,) = set(pool.run(serve, self.config, folder, close, timeout=timeout))
        except BaseException as error:
            self._failure = error


def _name(rank: int) -> bytes:
    return f"rank {rank}".encode()


class SingleRank:
    """What one rank alone answers to greedy requests; each prompt is computed once."""

    def __init__(self, model: Path, longest: int):
        self._core = build_engine(resolve(Config(model=str(model), **SMALL)))
        self._longest = longest
        self._known: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            sampling = SamplingParams(max_tokens=self._longest)
            self._core.add(AddRequest(id="alone", prompt_ids=prompt, sampling=sampling))
            self._known[key] = []
            while self._core.has_work():
                for output in self._core.step():
                    self._known[key] += output.token_ids
        return self._known[key][:max_tokens]
