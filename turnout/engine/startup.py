"""How long each phase of an engine's start took."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

logger = logging.getLogger(__name__)

# In their order. A rank may skip some: a CPU has no graphs, one rank no rendezvous.
PHASES = (
    "imports",
    "plan",
    "rendezvous",
    "weights",
    "kernels",
    "kv_cache",
    "cuda_graphs",
    "warm_up",
    "check",
)


class StartupTimes:
    """Phases follow one another: where one begins, the one before it ends.

    seconds: by phase, those that have ended; a phase that begins twice adds up.
    """

    def __init__(self, *, with_process: bool = True) -> None:
        """with_process: whether the first phase began with the process; otherwise it begins now."""
        self.seconds: dict[str, float] = {}
        self._phase = PHASES[0]
        self._began = time.monotonic()
        if with_process and sys.platform == "linux":
            self._began -= _age()

    def begin(self, phase: str) -> None:
        """The present phase ends, and `phase`, one of PHASES, begins."""
        assert phase in PHASES, phase
        self.end()
        self._phase = phase
        logger.debug("%s begins %.1f s after the process", phase, sum(self.seconds.values()))

    def end(self) -> None:
        """The present phase ends, and with it the start, unless another one begins."""
        now = time.monotonic()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._began
        self._began = now

    def __str__(self) -> str:
        parts = ", ".join(
            f"{phase.replace('_', ' ')} {seconds:.1f}" for phase, seconds in self.seconds.items()
        )
        return f"started in {sum(self.seconds.values()):.1f} s: {parts}"


def _age() -> float:
    """Seconds since this process began; psutil rounds the time of boot, and is off by up to one."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
