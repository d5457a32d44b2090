"""Which requests an engine may have computed, as far as the order tells in which it admits them."""

from __future__ import annotations

from bisect import bisect_left, insort


class Admission:
    """The requests of one engine that are not finished. One caller.

    An engine admits the first of those that wait, by priority and then arrival, while fewer than `slots` run.
    So whatever it admits is among the first `slots` of all in that moment, even where pages or tokens of a
    step let fewer run; and what it has admitted may be computed until it finishes, whatever comes before it
    later.
    """

    def __init__(self, slots: int):
        self._slots = slots
        self._order: list[tuple[int, int, str]] = []  # priority, number of arrival, id
        self._places: dict[str, tuple[int, int, str]] = {}
        self._arrivals = 0
        self.admitted: set[str] = set()  # ids of those that may have been

    def add(self, id: str, priority: int = 0) -> None:
        """priority: lower ones count as earlier arrivals."""
        self._arrivals += 1
        place = self._places[id] = (priority, self._arrivals, id)
        insort(self._order, place)
        if bisect_left(self._order, place) < self._slots:
            self.admitted.add(id)

    def remove(self, id: str) -> None:
        """It is finished or aborted. Unknown ids are ignored."""
        place = self._places.pop(id, None)
        if place is None:
            return
        index = bisect_left(self._order, place)
        del self._order[index]
        self.admitted.discard(id)
        if index < self._slots <= len(self._order):
            self.admitted.add(self._order[self._slots - 1][2])
