"""Signs of life: what each rank of a host is doing, on a board that the server reads.

The board is a file that all ranks of one host map, a line for each. A rank notes there what it is about to
do, and a thread that does nothing else counts heartbeats, so that the reader can tell a process that does
not run from one that waits for others. Each field is one aligned word with one writer, so nothing is locked.
Torch-free.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

LINE = 128  # bytes: apart by more than a cache line
WORD = struct.Struct("<q")
BEATS, STEP, PHASE, COLLECTIVES, PARTS = 0, 8, 16, 24, 32  # offsets in a line
BEAT_SECONDS = 0.2

# What a rank can be doing, in the order of a step.
STARTING = ("loading", "compiling", "profiling")
PHASES = (*STARTING, "resting", "agreeing", "prefill", "decode", "settling")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One rank's line: heartbeats, forwards computed, what it does now, and collectives begun.

    parts: what was begun of loading (layers, sizes to compile) and of forwards (layers) since the start.
    """

    beats: int = 0
    step: int = 0
    phase: str = PHASES[0]
    collectives: int = 0
    parts: int = 0

    @property
    def progress(self) -> tuple[int, int, int, int]:
        """Grows as the rank gets on. Of ranks that wait for each other, the least one is waited for."""
        return self.step, self.parts, self.collectives, PHASES.index(self.phase)


class Board:
    """The lines of `size` ranks in the file at `path`; whoever comes first makes it."""

    def __init__(self, path: Path, size: int):
        self.size = size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, LINE * size)  # of the same size, hence harmless when repeated
            self._memory = mmap.mmap(descriptor, LINE * size)
        finally:
            os.close(descriptor)

    def read(self, line: int) -> Reading:
        return Reading(
            beats=self._get(line, BEATS),
            step=self._get(line, STEP),
            phase=PHASES[self._get(line, PHASE)],
            collectives=self._get(line, COLLECTIVES),
            parts=self._get(line, PARTS),
        )

    @property
    def closed(self) -> bool:
        return self._memory.closed

    def close(self) -> None:
        """Let go of the file; nothing can be read or put any more."""
        self._memory.close()

    def put(self, line: int, offset: int, value: int) -> None:
        WORD.pack_into(self._memory, LINE * line + offset, value)

    def _get(self, line: int, offset: int) -> int:
        return WORD.unpack_from(self._memory, LINE * line + offset)[0]


class Progress(Protocol):
    """Where a rank says how far it is."""

    def note(self, step: int | None, phase: str) -> None:
        """`step` forwards are done (None: as many as before), and one of PHASES begins."""
        ...


class Unwatched:
    """A `Progress` that is not read."""

    def note(self, step: int | None, phase: str) -> None:
        pass


class Pulse:
    """One rank's hand on the board: a `Progress`, and a thread that beats until the process ends.

    collectives, parts: how many this rank has begun, see `Reading`; replaced once somebody counts.
    """

    def __init__(self, board: Board, line: int):
        self.collectives: Callable[[], int] = int
        self.parts: Callable[[], int] = int
        self._board, self._line = board, line
        self._beats = 0
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def note(self, step: int | None, phase: str) -> None:
        if step is not None:
            self._board.put(self._line, STEP, step)
        self._count()
        self._board.put(self._line, PHASE, PHASES.index(phase))

    def _beat(self) -> None:
        while True:
            self._beats += 1
            self._count()
            self._board.put(self._line, BEATS, self._beats)
            time.sleep(BEAT_SECONDS)

    def _count(self) -> None:
        self._board.put(self._line, COLLECTIVES, self.collectives())
        self._board.put(self._line, PARTS, self.parts())
