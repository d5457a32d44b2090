"""Prompts of data-parallel ranks in the same steps: whole schedulers in a simulation of their steps, by a
clock of its own, and what the ranks' real synchronisation makes of their records."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.engine.scheduler.test_scheduler import start
from turnout.engine.ranks.step_sync import PHASES, StepSync
from turnout.engine.scheduler.block_pool import KVBlockPool
from turnout.engine.scheduler.kv_cache import KVCache
from turnout.engine.scheduler.prefill_delayer import PrefillDelayer
from turnout.engine.scheduler.request import Request
from turnout.engine.scheduler.scheduler import Chunk, Lack, Scheduler
from turnout.engine.scheduler.step_times import StepTimes
from turnout.parallel.exchange import StepRecord
from turnout.parallel.topology import Topology
from turnout.vocabulary import Phase

DECODE, PROMPT = 0.010, 0.030  # seconds of a step without and with prompts
STEPS = 8  # that a prompt is held for at most


@dataclass
class Arrival:
    at: float
    dp_rank: int
    prompt: int
    answer: int
    priority: int


def poisson(rates: list[float], seconds: float, seed: int = 0) -> list[Arrival]:
    """Of so many requests a second at each rank."""
    draw, found = random.Random(seed), []
    for dp_rank, rate in enumerate(rates):
        at = draw.expovariate(rate) if rate else seconds
        while at < seconds:
            arrival = Arrival(at, dp_rank, draw.randint(50, 400), draw.randint(30, 90), draw.randint(-1, 1))
            found.append(arrival)
            at += draw.expovariate(rate)
    return sorted(found, key=lambda arrival: arrival.at)


@dataclass
class Seen:
    """waits: steps from each request's arrival to its first chunk. held: the longest run of steps in which a
    rank admitted no request though the first of its queue had room."""

    steps: int = 0
    uneven: int = 0
    with_prompts: int = 0
    seconds: float = 0.0
    held: int = 0
    longest_hold: float = 0.0
    preemptions: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    first_tokens: dict[str, float] = field(default_factory=dict)


class Rank:
    """One rank's scheduler and its side of the synchronisation; it draws tokens that mean nothing."""

    def __init__(self, topology: Topology, delayer: PrefillDelayer | None, settings: dict[str, Any]) -> None:
        defaults = {"max_running": 64, "chunk_tokens": 8192, "prefill_tokens": 8192, "max_context": 1024}
        pages = settings.pop("pages", 4096)
        pools = [KVBlockPool(pages, reuse=False)]
        self.scheduler = Scheduler(KVCache(pools, 16), delayer=delayer, **(defaults | settings))
        self.delayer, self.topology = delayer, topology
        self.step_sync = StepSync(topology)
        self.requests: dict[str, Request] = {}
        self.chunks: list[Chunk] = []

    def record(self) -> StepRecord:
        self.chunks = self.scheduler.schedule()
        phase = None
        if self.chunks:
            phase = Phase.DECODE if all(chunk.decodes for chunk in self.chunks) else Phase.PREFILL
        return StepRecord(
            tokens=sum(chunk.length for chunk in self.chunks),
            phase=PHASES.index(phase),
            next_prompts=self.scheduler.next_prompts(self.chunks),
        )

    def compute(self) -> list[str]:
        """Requests that got their first token."""
        self.scheduler.computed(self.chunks)
        first = []
        for request in [chunk.request for chunk in self.chunks if chunk.samples]:
            if request.num_output == 0:
                first.append(request.id)
            request.tokens.append(0)
            if request.num_output >= request.sampling.max_tokens:
                self.scheduler.remove(request)
        return first


def simulate(
    arrivals: list[Arrival],
    *,
    delayed: bool,
    dp_size: int = 4,
    members: int = 1,
    seconds: float = 1.0,
    target: float = 0.0,
    **settings: Any,
) -> Seen:
    """members: ranks that share the requests of each group, whose clocks differ. seconds: that a prompt is
    held for at most. target: see StepTimes."""
    now, seen, runs, since = 0.0, Seen(), [0] * dp_size, [0.0] * dp_size
    ranks: list[Rank] = []
    for number in range(dp_size * members):
        topology = Topology(
            tp_size=dp_size * members, dp_size=dp_size, ep_size=1, enable_dp_attention=True, rank=number
        )
        speed = 1 + 0.3 * number / (dp_size * members)
        delayer = PrefillDelayer(STEPS, seconds, lambda speed=speed: 100 + speed * now) if delayed else None
        times = StepTimes(target) if target else None
        ranks.append(Rank(topology, delayer, settings | {"times": times}))
    pending, arrived = list(enumerate(arrivals))[::-1], {}
    while pending or any(rank.scheduler.waiting or rank.scheduler.running for rank in ranks):
        while pending and pending[-1][1].at <= now:
            number, arrival = pending.pop()
            id = str(number)
            arrived[id] = seen.steps
            for rank in ranks[arrival.dp_rank * members :][:members]:
                request = start(id, [0] * arrival.prompt, arrival.answer)
                request.priority = arrival.priority
                rank.scheduler.add(request)
        records = [rank.record() for rank in ranks]
        synced = {rank.topology.rank: rank.step_sync.agreed(records) for rank in ranks}
        for rank in ranks:
            if rank.delayer is not None:
                own = synced[rank.topology.rank]
                rank.delayer.heard(own.prefill_due, own.phases, rank.topology.dp_rank)
        step = synced[0]
        if step.phase is None:
            now = pending[-1][1].at
            continue
        for dp_rank in range(dp_size):
            group = ranks[dp_rank * members :][:members]
            shared = [[(c.request.id, c.start, c.end) for c in rank.chunks] for rank in group]
            assert shared == [shared[0]] * members
            for id, first, _ in shared[0]:
                if first == 0:
                    seen.waits.setdefault(id, seen.steps - arrived[id])
            holding = group[0].scheduler.lack == Lack.RANKS
            since[dp_rank] = since[dp_rank] if runs[dp_rank] else now
            runs[dp_rank] = runs[dp_rank] + 1 if holding else 0
            seen.held = max(seen.held, runs[dp_rank])
        for rank in ranks:
            for id in rank.compute():
                seen.first_tokens[id] = now
        length = PROMPT if step.phase == Phase.PREFILL else DECODE
        now += length
        for dp_rank, run in enumerate(runs):
            if run:
                seen.longest_hold = max(seen.longest_hold, now - since[dp_rank])
        for rank in ranks:
            if (times := rank.scheduler.times) is not None:
                decoding = sum(chunk.decodes for chunk in rank.chunks)
                times.launched(decoding, sum(chunk.length for chunk in rank.chunks) - decoding)
                times.read(now)
        seen.steps += 1
        seen.uneven += step.uneven
        seen.with_prompts += step.phase == Phase.PREFILL
    seen.seconds = now
    seen.preemptions = sum(rank.scheduler.preemptions for rank in ranks)
    assert len(seen.waits) == len(arrivals)
    assert all(rank.scheduler.kv.pools[0].num_live == 0 for rank in ranks)
    return seen


def test_ranks_compute_prompts_in_the_same_steps():
    """At 16 requests a second and rank, a prompt somewhere in every second step."""
    arrivals = poisson([16.0] * 4, 6)
    apart, together = (simulate(arrivals, delayed=delayed) for delayed in (False, True))
    assert apart.uneven > 150
    assert together.uneven < apart.uneven / 4
    assert together.with_prompts < apart.with_prompts / 2.5
    assert max(together.waits.values()) <= STEPS
    assert apart.held == 0 < together.held <= STEPS


@pytest.mark.parametrize("rates", [[6.0, 0, 0, 0], [0.5, 0.5, 0, 0]], ids=["of one rank", "seldom"])
def test_prompts_that_come_apart_anyway_do_not_wait(rates: list[float]):
    seen = simulate(poisson(rates, 20), delayed=True)
    assert seen.with_prompts > 10
    assert max(seen.waits.values()) == seen.held == 0


def test_a_rank_that_decodes_nothing_holds_nothing():
    """Its first token comes as soon as without, however busy the others are."""
    arrivals = poisson([16.0, 16.0, 16.0, 0], 6) + [Arrival(0.5 + i / 2, 3, 100, 1, 0) for i in range(10)]
    arrivals.sort(key=lambda arrival: arrival.at)
    seen = simulate(arrivals, delayed=True)
    own = [str(number) for number, arrival in enumerate(arrivals) if arrival.dp_rank == 3]
    assert len(own) == 10
    assert all(seen.waits[id] == 0 for id in own)
    assert seen.held > 0


@pytest.mark.parametrize(
    ("settings", "uneven"),
    [
        ({"chunk_tokens": 64, "prefill_tokens": 256}, 1.1),  # prompts are in most steps anyway
        ({"by_priority": True, "max_running": 8}, 0.4),
        ({"pages": 40, "max_running": 12}, 1.1),  # requests without pages are not held
        ({"target": 0.050}, 0.8),
        ({"members": 2, "dp_size": 3}, 0.5),
    ],
    ids=["chunks", "priorities", "few pages", "target", "shared requests"],
)
def test_a_hold_ends_in_time_and_nobody_starves(settings: dict[str, Any], uneven: float):
    """`simulate` sees to it that each request ends; the sizes in `settings` keep some of them in queues."""
    arrivals = poisson([12.0] * settings.get("dp_size", 4), 4, seed=1)
    apart, together = (simulate(arrivals, delayed=delayed, **settings) for delayed in (False, True))
    assert 1 < together.held <= STEPS
    assert together.uneven < uneven * apart.uneven
    assert together.preemptions > 0 or "pages" not in settings
    assert together.seconds < 1.1 * apart.seconds


@pytest.mark.parametrize("milliseconds", [0, 15, 45])
def test_a_hold_ends_by_the_clock_too(milliseconds: int):
    """One step is always waited, of 30 ms at most, and the last may be longer than the one before."""
    seen = simulate(poisson([16.0] * 4, 4), delayed=True, seconds=milliseconds / 1000)
    assert 0 < seen.longest_hold <= milliseconds / 1000 + PROMPT
    assert 0 < seen.held <= max(1, milliseconds // 10)
