"""What the server takes for computed, compared with what the scheduler runs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.scheduler.test_scheduler import make, start, step
from turnout.engine.scheduler.request import Request
from turnout.server.supervise.admission import Admission


class Both:
    """A scheduler, and the server's view of it."""

    def __init__(self, num_pages: int, *, running: int, by_priority: bool = False, **sizes: int):
        self.scheduler = make(num_pages, running=running, by_priority=by_priority, **sizes)
        self.admission, self.by_priority = Admission(running), by_priority
        self.alive: list[Request] = []

    def add(self, id: str, length: int, max_tokens: int, priority: int) -> None:
        request = start(id, [1] * length, max_tokens)
        request.priority = priority
        self.alive.append(request)
        self.scheduler.add(request)
        self.admission.add(id, priority if self.by_priority else 0)

    def remove(self, request: Request) -> None:
        self.alive.remove(request)
        self.scheduler.remove(request)
        self.admission.remove(request.id)

    def step(self) -> set[str]:
        """Ids of the requests that were computed."""
        computed = {chunk.request.id for chunk in step(self.scheduler)}
        assert computed <= self.admission.admitted
        return computed

    def end_finished(self) -> None:
        for request in [r for r in self.alive if r.num_output >= r.sampling.max_tokens]:
            self.remove(request)


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    num_pages=st.integers(8, 24),
    running=st.integers(1, 5),
    budget=st.integers(1, 20),
    by_priority=st.booleans(),
)
def test_all_that_is_computed_counts(
    data: st.DataObject, num_pages: int, running: int, budget: int, by_priority: bool
):
    """However few pages and tokens of a step there are, whoever comes, hangs up or is preempted."""
    both = Both(num_pages, running=running, budget=budget, by_priority=by_priority)
    for arrived in range(25):
        for choice in range(data.draw(st.integers(0, 2))):
            sizes = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 12))
            both.add(f"{arrived}-{choice}", *sizes, data.draw(st.integers(-1, 1)))
        if both.alive and data.draw(st.integers(0, 9)) == 0:
            both.remove(data.draw(st.sampled_from(both.alive)))
        both.step()
        both.end_finished()
        assert both.admission.admitted <= {request.id for request in both.alive}


def test_in_order_of_arrival_only_what_is_computed_counts():
    """Where slots are all that is short."""
    both = Both(64, running=2, budget=64, chunk=64)
    for id in "abcd":
        both.add(id, 3, 2, 0)
    for expected in ("ab", "ab", "cd"):
        assert both.step() == both.admission.admitted == set(expected)
        both.end_finished()


def test_who_comes_first_later_takes_the_next_slot_and_displaces_nobody():
    both = Both(64, running=2, budget=64, chunk=4, by_priority=True)
    both.add("long prompt", 20, 2, 1)
    both.add("short", 2, 3, 1)
    both.add("waits", 2, 3, 1)
    both.step()
    for i in range(3):
        both.add(f"preferred {i}", 2, 9, 0)
    assert both.step() == {"long prompt", "short"}
    while "preferred 0" not in both.step():
        both.end_finished()
    assert "waits" not in both.admission.admitted
