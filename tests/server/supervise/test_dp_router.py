"""Where requests go: pure decisions, no ranks."""

from __future__ import annotations

import random
from collections import Counter

from turnout.server.supervise.dp_router import TYPICAL_OUTPUT, Router

PAGE = 4


def prompt(*head: int, length: int = 40) -> list[int]:
    """`length` tokens that begin with `head` and differ from other heads' in every page."""
    return [*head, *(1000 * head[-1] + i for i in range(length - len(head)))]


def test_equal_requests_spread_evenly():
    router = Router(4, PAGE)
    placed = [router.place(str(i), prompt(i), 32) for i in range(12)]
    assert Counter(placed) == dict.fromkeys(range(4), 3)
    assert placed[:4] == [0, 1, 2, 3]


def test_work_counts_not_requests():
    router = Router(2, PAGE)
    assert router.place("long", prompt(1, length=400), 100) == 0
    assert [router.place(f"short {i}", prompt(10 + i), 10) for i in range(5)] == [1] * 5


def test_work_that_is_done_counts_no_longer():
    router = Router(2, PAGE)
    assert router.place("first", prompt(1, length=100), 50) == 0
    assert router.place("second", prompt(2, length=50), 50) == 1
    router.produced("first", 40)  # its prompt is computed and ten tokens are to come
    assert router.place("third", prompt(3), 1) == 0
    router.finished("first")
    router.finished("third")
    assert router.place("fourth", prompt(4, length=90), 50) == 0


def test_a_bound_on_the_output_is_not_its_length():
    """Whoever leaves max_tokens open does not fill a rank, and what is typical is learnt."""
    router = Router(2, PAGE)
    assert router.place("open", prompt(1), 100_000) == 0
    assert router.place("other", prompt(2, length=60 + int(TYPICAL_OUTPUT)), 50) == 1
    assert router.place("next", prompt(3), 10) == 0
    for i in range(200):
        router.place(f"brief {i}", [7], 500)
        router.produced(f"brief {i}", 2)
        router.finished(f"brief {i}")
    router = _finished_all(router)
    assert router.place("a", prompt(4, length=20), 100_000) == 0
    assert router.place("b", prompt(5, length=30), 100_000) == 1
    assert router.place("c", prompt(6, length=9), 100_000) == 0
    assert router.place("d", prompt(7, length=9), 100_000) == 1


def _finished_all(router: Router) -> Router:
    for id in ("open", "other", "next"):
        router.finished(id, complete=False)
    return router


def test_the_holder_of_the_longest_prefix_is_preferred():
    router = Router(3, PAGE)
    short, long = prompt(1, length=12), prompt(1, length=200)
    assert router.place("elsewhere", prompt(9, length=10), 10) == 0
    assert router.place("short", short, 10) == 1
    router.finished("elsewhere")
    router.finished("short")
    assert router.place("long", long, 10) == 1
    router.finished("long")
    assert router.place("same", [*long, 5], 10) == 1
    assert router.place("other", prompt(3, length=200), 10) == 0


def test_a_busy_holder_loses_to_an_idle_rank():
    """The saving is 96 tokens: the holder wins with less other work than that, and loses with more."""
    shared = prompt(1, length=100)
    for other_work, expected in ((60, 0), (140, 1)):
        router = Router(2, PAGE)
        assert router.place("first", shared, 1) == 0
        router.finished("first")
        assert router.place("other", prompt(2, length=other_work), 1) == 0
        assert router.place("again", shared, 1) == expected


def test_all_choices_of_one_prompt_do_not_pile_up():
    router = Router(2, PAGE)
    placed = [router.place(f"choice {i}", prompt(1, length=100), 64) for i in range(8)]
    assert 3 <= Counter(placed)[0] <= 5


def test_a_prefix_must_be_whole():
    """A page counts only after all pages before it."""
    router = Router(2, PAGE)
    assert router.place("first", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1) == 0
    router.finished("first")
    router.place("load", prompt(8, length=4), 1)
    assert router.place("tail only", [9, 9, 9, 9, 5, 6, 7, 8, 9], 1) == 1


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first():
    router = Router(2, PAGE, known_pages=20)
    old, new = prompt(1, length=41), prompt(2, length=41)
    for id, ids in (("old", old), ("new", new), ("third", prompt(3, length=41))):
        router.place(id, ids, 1)
        router.finished(id)
    assert len(router._holders) == 20
    router.place("load", prompt(4, length=3), 1)  # on rank 0, and too short for a page
    assert router.place("new again", new, 1) == 0
    assert router.place("old again", old, 1) == 1


def test_without_a_prefix_cache_nothing_is_preferred():
    router = Router(2, PAGE, known_pages=0)
    router.place("first", prompt(1, length=100), 1)
    router.finished("first")
    router.place("load", prompt(2, length=5), 1)
    assert router.place("again", prompt(1, length=100), 1) == 1


def test_random_traffic_stays_balanced():
    """However requests come and go, no rank has more than one request's work above the least."""
    rng = random.Random(0)
    router = Router(4, PAGE)
    live: list[str] = []
    for i in range(2000):
        action = rng.random()
        if action < 0.5 or not live:
            id = str(i)
            work = router.work()
            rank = router.place(id, [rng.randrange(10**6) for _ in range(rng.randrange(1, 60))], 20)
            assert work[rank] == min(work)
            live.append(id)
        elif action < 0.8:
            router.produced(rng.choice(live), 1)
        else:
            id = live.pop(rng.randrange(len(live)))
            router.finished(id, complete=rng.random() < 0.5)
    for id in live:
        router.finished(id)
    router.finished("unknown")
    router.produced("unknown", 1)
    assert router.work() == [0] * 4
