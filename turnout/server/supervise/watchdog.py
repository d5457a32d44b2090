"""Who keeps the others waiting: found by looking at the ranks' board now and then. Pure, told the time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnout.parallel.health import Reading

STILL_SECONDS = 5.0  # without a heartbeat until a process is shown as stalled


@dataclass(frozen=True)
class Stall:
    """`rank` keeps a group with work from getting on; `runs` tells whether its process runs at all."""

    rank: int
    reading: Reading
    seconds: float
    runs: bool

    def __str__(self) -> str:
        why = "is waited for" if self.runs else "does not run (no heartbeat)"
        at = self.reading
        return (
            f"rank {self.rank} {why}: no progress for {self.seconds:.0f} s; it is at step {at.step}, "
            f"phase {at.phase}, with {at.collectives} collectives begun"
        )


class Watchdog:
    """Looks at a group that is ready; `timeout` in seconds."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._readings: dict[int, Reading] = {}
        self._beat: dict[int, float] = {}  # when each rank's heart was last seen to have beaten
        self._moved = 0.0  # when any rank last got on, or there was nothing to do

    def look(self, now: float, readings: Mapping[int, Reading], *, busy: bool) -> Stall | None:
        """Take note of `readings`; a Stall if a busy group has stood still for the timeout."""
        for rank, reading in readings.items():
            before = self._readings.get(rank)
            if before is None or reading.beats != before.beats:
                self._beat[rank] = now
            if before is None or reading.progress != before.progress:
                self._moved = now
        self._readings = dict(readings)
        if not busy:
            self._moved = now
        if not readings or now - self._moved < self._timeout:
            return None
        return self._blame(now)

    def silence(self, rank: int, now: float) -> float:
        """Seconds since the last heartbeat seen."""
        return now - self._beat.get(rank, now)

    def _blame(self, now: float) -> Stall:
        """The process that has been still, of several the longest; else the rank that is behind."""
        quiet = max(self._readings, key=lambda rank: self.silence(rank, now))
        runs = self.silence(quiet, now) < self._timeout / 2
        behind = min(self._readings, key=lambda rank: self._readings[rank].progress)
        rank = behind if runs else quiet
        return Stall(rank, self._readings[rank], now - self._moved, runs)
