"""What is owed to clients, over ranks that die as the test says."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from turnout.engine.messages import AddRequest, RequestOutput
from turnout.engine.sampling_params import SamplingParams
from turnout.server.supervise.ledger import PROGRESS_OUTPUTS, EngineFailed, Entry, Ledger, Sink

STRIKES = 2
TOKENS = 6  # of every request


def unread(output: RequestOutput | EngineFailed) -> None:
    pass


def add(ledger: Ledger, id: str, sink: Sink = unread, **sampling: Any) -> None:
    params = SamplingParams(**({"max_tokens": TOKENS} | sampling))
    ledger.add(AddRequest(id=id, prompt_ids=[1, 2, 3], sampling=params), sink)


def filled(*ids: str, strikes: int = STRIKES) -> Ledger:
    ledger = Ledger(strikes)
    for id in ids:
        add(ledger, id)
    return ledger


def names(entries: list[Entry]) -> list[str]:
    return [entry.request.id for entry in entries]


def give(ledger: Ledger, entry: Entry, *tokens: int, last: bool = False) -> bool:
    output = RequestOutput(
        id=entry.request.id, token_ids=list(tokens), finish_reason="stop" if last else None
    )
    return ledger.delivered(entry, output)


def test_requests_go_on_after_what_was_delivered_in_the_order_of_arrival():
    ledger = filled("a", "b")
    _, b = ledger.due()
    assert ledger.due() == []
    assert b.message() is b.request
    give(ledger, b, 7, 8)
    give(ledger, b, 9)
    assert ledger.ranks_died(["a", "b"]) == []
    add(ledger, "c")
    again = ledger.due()
    assert names(again) == ["a", "b", "c"]
    assert [entry.message().output_ids for entry in again] == [[], [7, 8, 9], []]
    assert (ledger.resumed, ledger.replayed_tokens) == (2, 3 + 3 + 3)
    give(ledger, again[1], 10, last=True)
    ledger.park()
    assert names(ledger.due()) == ["a", "c"]
    assert len(ledger) == 2


def test_seeds_are_chosen_once_and_only_where_none_is_asked_for():
    ledger = Ledger(STRIKES, first_seed=2**63 - 1)
    for id, seed in (("a", None), ("b", 5), ("c", None)):
        add(ledger, id, seed=seed)
    seeds = [entry.message().sampling.seed for entry in ledger.due()]
    assert seeds == [2**63 - 1, 5, 0]
    ledger.park()
    assert [entry.message().sampling.seed for entry in ledger.due()] == seeds


def test_the_forgotten_are_not_submitted_again():
    ledger = filled("a", "b", "c")
    ledger.due()
    ledger.abort(["a", "unknown"])
    ledger.park()
    ledger.abort(["b"])
    assert names(ledger.due()) == ["c"]


def suspected(*ids: str) -> Ledger:
    """Requests over which the ranks have died as often as they may."""
    ledger = filled(*ids)
    for _ in range(STRIKES):
        ledger.due()
        assert ledger.ranks_died(ids) == []
    return ledger


def get_on(ledger: Ledger, *entries: Entry) -> None:
    for entry in entries:
        for _ in range(PROGRESS_OUTPUTS):
            give(ledger, entry, 1)


def test_suspects_are_tried_by_halves_in_their_turn():
    ledger = filled("a", "b", "c", "d", "e")
    entries = ledger.due()
    give(ledger, entries[1], 1)
    assert ledger.ranks_died(["a", "b", "c", "d", "e"]) == []
    a, b, c, d, e = ledger.due()
    get_on(ledger, b)  # and is no suspect
    assert ledger.ranks_died(["a", "b", "c", "d", "e"]) == []
    add(ledger, "new")
    assert ledger.due() == [a, c]
    assert ledger.due() == []
    assert not give(ledger, a, 1)  # its known tokens were computed; now it must decode
    assert give(ledger, a, 1)
    assert ledger.due() == []  # c may still be the reason if ranks die
    give(ledger, c, 1)
    assert give(ledger, c, 1)
    assert ledger.due() == [b]  # older than the other half
    get_on(ledger, b)
    assert ledger.due() == [d]  # they have died over these two: each by itself now
    assert ledger.abort(["d"])
    assert ledger.due() == [e]
    get_on(ledger, e)
    assert names(ledger.due()) == ["new"]


def test_a_death_in_a_trial_counts_against_those_on_trial_only():
    ledger = suspected("a", "b", "c", "d")
    a, b = ledger.due()
    get_on(ledger, a)
    add(ledger, "new")
    assert ledger.ranks_died(["a", "b"]) == []
    strikes = [(entry.strikes, entry.alone) for entry in ledger._entries.values()]
    assert strikes == [(0, 0), (STRIKES + 1, 1), (STRIKES, 0), (STRIKES, 0), (0, 0)]
    assert ledger.due() == [b]
    assert ledger.ranks_died(["b"]) == [b]


def test_those_on_trial_that_the_engine_did_not_compute_are_tried_later():
    ledger = suspected("a", "b", "c", "d", "e", "f", "g", "h")
    assert names(ledger.due()) == ["a", "b", "c", "d"]
    assert ledger.ranks_died(["a", "b"]) == []  # the engine computes two at once
    assert names(ledger.due()) == ["a"]
    assert ledger.ranks_died(["a"]) == []
    assert names(ledger.due()) == ["a"]
    assert names(ledger.ranks_died(["a"])) == ["a"]
    (b,) = ledger.due()
    get_on(ledger, b)
    assert names(ledger.due()) == ["c", "d"]


@pytest.mark.parametrize(("passed", "deaths"), [(0, 2), (1, 3), (2, 4), (3, 4)])
def test_trials_that_are_passed_after_all_make_blame_rarer(passed: int, deaths: int):
    """Ranks died in them by chance. deaths: over one request by itself until it is to blame."""
    ledger = filled("old", "tried")
    for times in [1] * passed + [deaths]:
        for _ in range(STRIKES):
            ledger.due()
            assert ledger.ranks_died(["tried"]) == []
        (old,) = ledger.due()
        get_on(ledger, old)
        blamed: list[Entry] = []
        for _ in range(times):
            assert blamed == []
            (tried,) = ledger.due()
            assert tried.request.id == "tried"
            blamed = ledger.ranks_died(["tried"])
        if times == 1:
            assert ledger.due() == [tried]  # before the older one
            get_on(ledger, tried)
        ledger.park()
    assert blamed == [tried]


def test_a_trial_that_was_passed_is_not_repeated_when_ranks_die_in_a_step_of_others():
    ledger = suspected("a", "b")
    (a,) = ledger.due()
    give(ledger, a, 1)
    assert give(ledger, a, 1)
    assert names(ledger.due()) == ["b"]
    assert ledger.ranks_died(["b"]) == []
    assert names(ledger.due()) == ["b"]


def test_whatever_ends_a_trial_lets_others_in():
    ledger = suspected("a", "b")
    (a,) = ledger.due()
    assert give(ledger, a, 1, last=True)
    assert names(ledger.due()) == ["b"]
    ledger.park()
    assert names(ledger.due()) == ["b"]


def test_requests_that_waited_in_the_engine_are_no_suspects():
    ledger = filled("a", "b")
    for _ in range(STRIKES):
        ledger.due()
        assert ledger.ranks_died(["a"]) == []
    assert names(ledger.due()) == ["a"]
    assert ledger.ranks_died(["a"]) == []
    assert names(ledger.due()) == ["a"]
    assert names(ledger.ranks_died(["a"])) == ["a"]
    assert names(ledger.due()) == ["b"]


def test_without_restarts_what_was_submitted_ends_when_ranks_die():
    ledger = filled("a", "b", strikes=0)
    ledger.due()
    add(ledger, "parked")
    assert names(ledger.ranks_died([])) == ["a", "b"]
    assert names(ledger.due()) == ["parked"]


def test_all_are_told_of_the_end():
    told: list[object] = []
    ledger = Ledger(STRIKES)
    add(ledger, "a", told.append)
    ledger.due()
    add(ledger, "b", told.append)
    failure = EngineFailed("the end")
    ledger.fail(failure)
    assert told == [failure, failure]
    assert len(ledger) == 0
    assert ledger.due() == []


def simulate(
    ledger: Ledger, kills: Callable[[Entry], bool], interrupt: Callable[[], bool] = lambda: False
) -> tuple[list[str], dict[str, list[int]], int]:
    """Ranks that give each request a token a step: (ids of those blamed, finished outputs, deaths).

    kills: whether the next step of an entry kills the ranks. interrupt: whether something else does.
    """
    blamed: list[str] = []
    finished: dict[str, list[int]] = {}
    deaths = 0
    while len(ledger):
        running = {entry.request.id: entry for entry in ledger.due()}
        while running:
            if interrupt() or any(kills(entry) for entry in running.values()):
                deaths += 1
                blamed += names(ledger.ranks_died(list(running)))
                break
            for entry in list(running.values()):
                last = len(entry.output_ids) == entry.request.sampling.max_tokens - 1
                give(ledger, entry, len(entry.output_ids), last=last)
                if last:
                    finished[entry.request.id] = running.pop(entry.request.id).output_ids
            running |= {entry.request.id: entry for entry in ledger.due()}
    return blamed, finished, deaths


def most_deaths(requests: int, killers: int = 1, strikes: int = STRIKES) -> int:
    """Until all killers are found: as many as requests may see, and then one for every halving."""
    return strikes + killers * (max(math.ceil(math.log2(requests)), 1) + 1)


@pytest.mark.parametrize("requests", [1, 2, 64])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("strikes", [1, 2, 3])
def test_a_request_that_kills_is_found_and_nothing_else_is_lost(requests: int, at: int, strikes: int):
    """From its token `at` on, whatever runs with it."""
    ids = [str(i) for i in range(requests)]
    poison = ids[requests // 2]
    ledger = filled(*ids, strikes=strikes)
    blamed, finished, deaths = simulate(
        ledger, lambda entry: entry.request.id == poison and len(entry.output_ids) >= at
    )
    assert blamed == [poison]
    assert finished == {id: list(range(TOKENS)) for id in ids if id != poison}
    assert strikes + 2 <= deaths <= most_deaths(requests, strikes=strikes)


@pytest.mark.parametrize("killers", [1, 2])
@pytest.mark.parametrize("seed", range(100))
def test_killers_of_any_place_among_any_number_are_found_by_halves(killers: int, seed: int):
    """They kill from the first token on. The others finish, and only deaths in their own trials count."""
    draw = random.Random(seed)
    ids = [str(i) for i in range(draw.randint(killers, 200))]
    poison = set(draw.sample(ids, killers))
    ledger = filled(*ids)
    tried_with = dict.fromkeys(ids, 0)

    die = ledger.ranks_died

    def ranks_died(computed: list[str]) -> list[Entry]:
        before = {id: entry.strikes for id, entry in ledger._entries.items()}
        stuck = {id for id in computed if not ledger._entries[id].progressed}
        blamed = die(computed)
        for id, entry in ledger._entries.items():
            assert entry.strikes == before[id] + (id in stuck)
            tried_with[id] += id in stuck
        return blamed

    ledger.ranks_died = ranks_died  # type: ignore[assignment,method-assign]
    blamed, finished, deaths = simulate(ledger, lambda entry: entry.request.id in poison)
    assert set(blamed) == poison
    assert finished == {id: list(range(TOKENS)) for id in ids if id not in poison}
    assert deaths <= most_deaths(len(ids), killers)
    if killers == 1:  # a half without it is not met by any death
        assert sorted(tried_with.values())[: len(ids) // 2] == [STRIKES] * (len(ids) // 2)


@pytest.mark.parametrize("seed", range(100))
def test_two_that_kill_at_any_token_are_found_and_nothing_else_is_lost(seed: int):
    """One that gets on, and kills later while others are on trial, is not taken for one of these."""
    draw = random.Random(seed)
    ids = [str(i) for i in range(draw.randint(2, 100))]
    at = {id: draw.randrange(TOKENS) for id in draw.sample(ids, 2)}
    blamed, finished, deaths = simulate(
        filled(*ids), lambda entry: len(entry.output_ids) >= at.get(entry.request.id, TOKENS)
    )
    assert sorted(blamed) == sorted(at)
    assert finished == {id: list(range(TOKENS)) for id in ids if id not in at}
    assert deaths <= 2 * (most_deaths(len(ids)) + 1)


def test_half_of_the_halvings_cost_no_death():
    """Where one half got on, the other one is the reason. On average over all places among 64."""
    ids = [str(i) for i in range(64)]
    deaths = [simulate(filled(*ids), lambda entry, at=at: entry.request.id == at)[2] for at in ids]
    assert max(deaths) == most_deaths(64) == STRIKES + 7
    assert statistics.mean(deaths) == STRIKES + 6 / 2 + 1.5


def test_a_request_that_kills_only_when_it_decodes_is_found():
    """Each time its known tokens are computed it gets one, which must not count as progress."""
    ledger = filled("a", "poison", "b")
    blamed, finished, deaths = simulate(
        ledger, lambda entry: entry.request.id == "poison" and entry.outputs == 1
    )
    assert (blamed, sorted(finished)) == (["poison"], ["a", "b"])
    assert deaths <= most_deaths(3)


def test_ranks_that_die_of_something_else_cost_no_request():
    """However often, as long as requests get on in between."""
    steps = itertools.count(1)
    ledger = filled(*(str(i) for i in range(8)))
    add(ledger, "long", max_tokens=200)
    blamed, finished, deaths = simulate(
        ledger, lambda entry: False, lambda: next(steps) % (PROGRESS_OUTPUTS + 1) == 0
    )
    assert blamed == []
    assert finished["long"] == list(range(200))
    assert len(finished) == 9
    assert deaths == 200 // PROGRESS_OUTPUTS - 1


def test_a_token_costs_the_same_however_many_came_before():
    """Lines of Python that run for one more token of a request that has 10, or 10,000."""
    ledger = filled("a")
    (entry,) = ledger.due()
    delivered = entry.output_ids
    give(ledger, entry)
    costs = []
    for known in (10, 10_000):
        give(ledger, entry, *range(known - len(entry.output_ids)))
        output = RequestOutput(id="a", token_ids=[1])
        costs.append(lines_run(lambda output=output: ledger.delivered(entry, output)))
    assert costs[0] == costs[1] < 20
    assert entry.output_ids is delivered
    assert entry.message().output_ids is delivered  # encoded from there


def lines_run(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count
