"""Waiting for what another process writes to shared memory.

A wait looks, then yields its core, then naps for an eighth of what it has waited so far: so it is over at
most an eighth late, ranks that wait for another's computation leave it the cores, and those that wait long
cost next to nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

LOOKS = 20  # before yielding; about 10 us
AWAKE = 300e-6  # seconds before the first nap, which no kernel makes shorter than 50 us
LONGEST_NAP = 1e-3


def pauses() -> Iterator[float]:
    """Seconds waited so far, before each look, without end."""
    for _ in range(LOOKS):
        yield 0.0
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        if waited < AWAKE:
            os.sched_yield()
        else:
            time.sleep(min(waited / 8, LONGEST_NAP))
        yield waited
