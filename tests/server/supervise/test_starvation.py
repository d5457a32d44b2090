"""How long requests wait while ranks die again and again for other reasons: the ledger on a simulated clock.

64 clients ask again as soon as they have their answers, of one to three sequences each, as those of
tools.chaos do. The ranks compute as the scheduler lets them: decoding first, then prompts in order of
submission. They take as long as four ranks took on two busy cores, so that a life is hardly long enough to
compute again what had been computed in the one before.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field

import pytest

from tests.server.supervise.test_ledger import STRIKES, add, give
from turnout.server.supervise.ledger import MAX_DOUBT, Entry, Ledger

CLIENTS = 64
CHOICES = (1, 1, 3, 1, 1, 1, 2, 2)  # of client after client
TOKENS = 100  # of each choice
PROMPT = 40
STEP = 0.05  # seconds, and
TOKEN = 0.001  # for each token of a step
STEP_TOKENS = 1024
RESTART = 2.7


@dataclass
class Request:
    """What one client waits for."""

    client: int
    born: int  # in which life
    left: set[str] = field(default_factory=set)  # choices without their last token


class Simulation:
    """One server, until so many deaths have come from outside and all is answered or blamed."""

    def __init__(
        self,
        seed: int,
        deaths: int,
        every: float,
        killers: tuple[int, ...] = (),
        *,
        even: bool = False,
        strikes: int = STRIKES,
    ):
        """every: seconds of service between deaths, on average, or exactly if `even`.

        killers: clients whose first request kills the ranks whenever they compute it."""
        self.ledger = Ledger(strikes)
        self.blamed: list[str] = []
        self.killed = 0  # times that ranks died over a killer
        self.lives: list[int] = []  # that each answer took
        self.oldest_progressed: list[bool] = []  # by death
        self.answers = [0] * CLIENTS
        self._draw, self._every, self._even = random.Random(seed), every, even
        self._deaths = deaths
        self._killers = {f"{client}.0.0" for client in killers}
        self._life = 0
        self._now = 0.0
        self._requests: dict[str, Request] = {}  # by sequence
        self._unfinished: dict[str, Request] = {}  # those of them that are not, the oldest first
        for client in range(CLIENTS):
            self._ask(client)

    def run(self) -> None:
        while len(self.ledger):
            self._life += 1
            self._now += RESTART
            self._live()

    def _ask(self, client: int) -> None:
        request = Request(client, self._life)
        for choice in range(CHOICES[client % len(CHOICES)]):
            id = f"{client}.{self.answers[client]}.{choice}"
            request.left.add(id)
            self._requests[id] = self._unfinished[id] = request
            add(self.ledger, id, max_tokens=TOKENS)

    def _live(self) -> None:
        """One group of ranks, until it dies."""
        end = float("inf")
        if self._deaths:
            end = self._now + (self._every if self._even else self._draw.expovariate(1 / self._every))
        oldest = next(iter(self._unfinished))
        running: dict[str, list] = {}  # entry and how many of its tokens lack keys and values
        while len(self.ledger):
            for entry in self.ledger.due():
                running[entry.request.id] = [entry, PROMPT + len(entry.output_ids)]
            step = self._step(running)
            if any(id in self._killers for id in step):
                self.killed += 1
                return self._die(running)
            self._now += STEP + TOKEN * sum(step.values())
            if self._now >= end:
                self._deaths -= 1
                self.oldest_progressed.append(oldest not in running or running[oldest][0].progressed)
                return self._die(running)
            for id, computed in step.items():
                running[id][1] -= computed
                if not running[id][1] and not self._give(running[id][0]):
                    running[id][1] = 1
            for id in [id for id in running if not running[id][1]]:
                del running[id]

    def _step(self, running: dict[str, list]) -> dict[str, int]:
        """How many tokens of each sequence the next step computes."""
        step = {id: 1 for id, (_, lacks) in running.items() if lacks == 1}
        room = STEP_TOKENS - len(step)
        for id, (_, lacks) in running.items():
            if id not in step and room:
                step[id] = min(lacks, room)
                room -= step[id]
        return step

    def _give(self, entry: Entry) -> bool:
        """Deliver a token; whether it is the last of its sequence. Its client may ask again at once."""
        request, id = self._requests[entry.request.id], entry.request.id
        last = len(entry.output_ids) == TOKENS - 1
        give(self.ledger, entry, 0, last=last)
        if last:
            del self._unfinished[id]
            request.left.discard(id)
            if not request.left:
                self.lives.append(self._life - request.born + 1)
                self.answers[request.client] += 1
                if self._deaths:
                    self._ask(request.client)
        return last

    def _die(self, running: dict[str, list]) -> None:
        for entry in self.ledger.ranks_died(list(running)):
            self.blamed.append(entry.request.id)
            request = self._requests[entry.request.id]
            self.ledger.abort(request.left)
            for id in request.left:
                del self._unfinished[id]
            self.answers[request.client] += 1
            if self._deaths:
                self._ask(request.client)


UNTRIED = 10**6  # strikes, so that no request is ever suspected


@pytest.mark.parametrize("seed", range(3))
def test_random_deaths_starve_no_request_and_cost_none(seed: int):
    """No request waits longer than where requests are not suspected of anything."""
    simulation, untried = (Simulation(seed, 100, 5.0, strikes=strikes) for strikes in (STRIKES, UNTRIED))
    simulation.run()
    untried.run()
    assert simulation.blamed == []
    assert max(simulation.lives) <= max(untried.lives)
    assert min(simulation.answers) >= 0.75 * min(untried.answers)


@pytest.mark.parametrize("seed", range(3))
def test_killers_are_found_among_random_deaths(seed: int):
    simulation = Simulation(seed, deaths=100, every=5.0, killers=(5, 40))
    simulation.run()
    assert sorted(simulation.blamed) == ["40.0.0", "5.0.0"]
    sequences = sum(CHOICES) * CLIENTS // len(CHOICES)
    assert simulation.killed <= STRIKES + 2 * (math.log2(sequences) + 1 + MAX_DOUBT)
    assert max(simulation.lives) <= 50


def test_deaths_at_regular_times_keep_no_request_waiting_for_long():
    simulation, untried = (
        Simulation(0, 100, 5.0, even=True, strikes=strikes) for strikes in (STRIKES, UNTRIED)
    )
    simulation.run()
    untried.run()
    assert simulation.blamed == []
    assert max(simulation.lives) < 1.5 * statistics.median(simulation.lives)
    assert max(simulation.lives) < max(untried.lives)


def test_the_oldest_request_gets_on_in_every_life():
    """Which bounds its wait by its own length, and so the wait of the one after it."""
    simulation = Simulation(0, deaths=100, every=3.0, even=True)
    simulation.run()
    assert all(simulation.oldest_progressed)
    assert len(simulation.oldest_progressed) == 100
