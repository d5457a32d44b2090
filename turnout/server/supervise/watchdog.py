"""Which rank keeps the others waiting, found by looking at the board now and then. Pure, told the time.

Two things can be wrong, and each has its deadline:

* A process does not run: its heartbeats stop, which come every 0.2 s whatever else it does. Measured on two
  ranks that answer 64 requests with drafts, on two cores of an AMD EPYC whose load was 11 to 15: at most
  0.3 s between two. `SILENT_SECONDS` is ten times that, for a rank given up by mistake costs some seconds and
  no request. While a rank loads or compiles, libraries hold Python's lock for longer (1.1 s was seen).
* All processes run, and none makes progress: no layer, collective, step or phase begins. How long that may
  take depends on the model and the machine (in the same measurement 0.4 s of a forward, and 6.4 s of a rank
  that was ready before the other), so it is measured: the longest pause of this group so far, of warm-up and
  compilation too, times `PATIENCE`, and at least `WAITING_SECONDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from turnout.parallel.health import STARTING, Reading

STILL_SECONDS = 2.0  # without a heartbeat until a process is shown as stalled
SILENT_SECONDS = 3.0  # without a heartbeat until it is given up
STARTING_SECONDS = 60.0  # the same while it loads, compiles or begins or ends a profile
WAITING_SECONDS = 30.0  # without progress of processes that run, until one is given up
PATIENCE = 5.0  # how many times the longest pause so far is waited for
BETWEEN_LOOKS = (
    1.0  # seconds counted at most: when the watchdog itself did not run, nor did the ranks perhaps
)


@dataclass(frozen=True)
class Stall:
    """`rank` keeps a group with work from making progress; `runs` tells whether its process runs at all."""

    rank: int
    reading: Reading
    seconds: float
    runs: bool

    def __str__(self) -> str:
        seconds = f"{self.seconds:.0f}"
        if self.runs:
            return f"rank {self.rank} is waited for: no progress for {seconds} s"
        return f"rank {self.rank} does not run: no heartbeat for {seconds} s"


class Watchdog:
    """Looks at one group, from its start on."""

    def __init__(self, timeout: float = 0.0):
        """timeout: in seconds, instead of both deadlines of a group that serves; 0: those deadlines."""
        self.longest = 0.0  # pause so far, in seconds
        self._timeout = timeout
        self._readings: dict[int, Reading] = {}
        self._beat: dict[int, float] = {}  # when each rank's heart was last seen to have beaten
        self._moved = 0.0  # when any rank last made progress, or there was nothing to do
        self._looked: float | None = None
        self._clock = 0.0  # seconds under observation

    def look(self, now: float, readings: Mapping[int, Reading], *, busy: bool) -> Stall | None:
        """Take note of `readings`; a Stall if a deadline of a busy group is over.

        A group that starts is busy.
        """
        self._clock += min(now - (now if self._looked is None else self._looked), BETWEEN_LOOKS)
        self._looked = now
        moved = False
        for rank, reading in readings.items():
            before = self._readings.get(rank, Reading())
            if rank not in self._beat or reading.beats != before.beats:
                self._beat[rank] = self._clock
            moved |= reading.progress != before.progress
        if moved and not any(reading.phase == "loading" for reading in self._readings.values()):
            self.longest = max(self.longest, self._clock - self._moved)
        if moved or not busy:
            self._moved = self._clock
        self._readings = dict(readings)
        return self._stall() if busy and readings else None

    def silence(self, rank: int) -> float:
        """Seconds since the last heartbeat seen."""
        return self._clock - self._beat.get(rank, self._clock)

    def _stall(self) -> Stall | None:
        """The process that has been silent for too long, of several the longest; else the rank behind."""
        begun = [rank for rank, reading in self._readings.items() if reading.beats]
        silent = [rank for rank in begun if self.silence(rank) >= self._silent_for(rank)]
        if silent:
            rank = max(silent, key=self.silence)
            return Stall(rank, self._readings[rank], self.silence(rank), runs=False)
        waited = self._clock - self._moved
        if waited < (self._timeout or max(WAITING_SECONDS, PATIENCE * self.longest)):
            return None
        if any(reading.phase in STARTING for reading in self._readings.values()):
            return None  # --startup-timeout is the limit
        rank = min(self._readings, key=lambda rank: self._readings[rank].progress)
        return Stall(rank, self._readings[rank], waited, runs=True)

    def _silent_for(self, rank: int) -> float:
        """Seconds that a rank may be silent."""
        if self._readings[rank].phase in STARTING:
            return max(self._timeout, STARTING_SECONDS)
        return self._timeout or SILENT_SECONDS


def circumstances(rank: int, readings: Mapping[int, Reading], host: str, *, steps: bool) -> str:
    """Where `rank` is and what it was doing, and which rank waited for it, to follow what happened to it.

    readings: of all ranks. steps: whether they have got as far as to make any.
    """
    place = f"; on host {host}, in phase {readings[rank].phase}"
    if steps:
        place += f" of step {readings[rank].step}"
    others = [other for other in readings if other != rank]
    if not others:
        return place
    peer = max(others, key=lambda other: readings[other].progress)
    return f"{place}, while rank {peer} was in phase {readings[peer].phase} of step {readings[peer].step}"
