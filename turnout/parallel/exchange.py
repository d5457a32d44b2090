"""The step exchange: before each step all ranks tell each other a small fixed record.

On one host it goes through shared memory, a file that all ranks map: each rank has two slots, used in
turn, and writes its record with the number of the exchange. No rank can be two exchanges ahead, so the slot
being written is one that all have read. A checksum over record and number tells a slot that is only
half written, on any processor. Between hosts it goes through a process group.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple, Protocol

from turnout.parallel.waiting import pauses

SLOT = 128  # bytes: apart by more than a cache line


class StepRecord(NamedTuple):
    """What one rank says before a step. Integers only; see `engine.step_sync` for how they are synced on.

    tokens:   tokens this rank brings
    phase:    0 no tokens, 1 decode, 2 prefill
    near_tie_tokens: of the sequence whose near-tie is decided next, 0 if none
    received: commands received so far
    executed: how many of them are executed
    digest:   of the tokens sampled so far: ranks of one DP group must agree
    leaving:  1 when told to shut down
    next_prompts: what the next step brings of prompts: 0 none, 1 held back, 2 some
    step_us:  microseconds that the last step took, if it only decoded and this one follows at once, else 0
    longest:  tokens of the longest context that this rank brings tokens of, these included
    """

    tokens: int = 0
    phase: int = 0
    near_tie_tokens: int = 0
    received: int = 0
    executed: int = 0
    digest: int = 0
    leaving: int = 0
    next_prompts: int = 0
    step_us: int = 0
    longest: int = 0


FIELDS = struct.Struct(f"<{len(StepRecord._fields)}q")
NUMBER = struct.Struct("<q")
CHECK = struct.Struct("<I")


class StepExchange(Protocol):
    def __call__(self, record: StepRecord) -> list[StepRecord]:
        """Everyone's record of this exchange, by rank; returns when all have come."""
        ...


class SingleRankExchange:
    """The exchange of a single rank."""

    def __call__(self, record: StepRecord) -> list[StepRecord]:
        return [record]


class SharedExchange:
    """Ranks of one host, through the file at `path`; whoever comes first makes it."""

    def __init__(self, path: Path, rank: int, size: int):
        self._rank, self._size = rank, size
        self._number = 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, 2 * SLOT * size)  # of the same size, hence harmless when repeated
            self._memory = mmap.mmap(descriptor, 2 * SLOT * size)
        finally:
            os.close(descriptor)

    def __call__(self, record: StepRecord) -> list[StepRecord]:
        self._number += 1
        payload = NUMBER.pack(self._number) + FIELDS.pack(*record)
        at = self._slot(self._rank)
        self._memory[at : at + len(payload) + CHECK.size] = payload + CHECK.pack(zlib.crc32(payload))
        return [record if rank == self._rank else self._wait(rank) for rank in range(self._size)]

    def _slot(self, rank: int) -> int:
        return (2 * rank + self._number % 2) * SLOT

    def _wait(self, rank: int) -> StepRecord:
        return next(record for _ in pauses() if (record := self._look(rank)) is not None)

    def _look(self, rank: int) -> StepRecord | None:
        """What `rank` says in this exchange, once it is there whole."""
        at = self._slot(rank)
        end = at + NUMBER.size + FIELDS.size
        if NUMBER.unpack_from(self._memory, at)[0] != self._number:
            return None
        payload = self._memory[at:end]
        if CHECK.unpack_from(self._memory, end)[0] != zlib.crc32(payload):
            return None
        return StepRecord._make(FIELDS.unpack_from(payload, NUMBER.size))
