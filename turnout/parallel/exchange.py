"""The step exchange: before each step all ranks tell each other a small fixed record.

On one host it goes through shared memory, a file that all ranks map: each rank has two slots, used in
turn, and writes its record with the number of the exchange. No rank can be two exchanges ahead, so the slot
being written is one that all have read. A checksum over record and number tells a slot that is only
half written, on any processor. Between hosts it goes through a process group.

A wait looks, then yields its core, then naps for an eighth of what it has waited so far: so it is over at
most an eighth late, ranks that wait for another's computation leave it the cores, and those that wait long
cost next to nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from pathlib import Path
from typing import NamedTuple, Protocol

SLOT = 128  # bytes: apart by more than a cache line
LOOKS = 20  # before yielding; about 10 us
AWAKE = 300e-6  # seconds before the first nap, which no kernel makes shorter than 50 us
LONGEST_NAP = 1e-3


class StepRecord(NamedTuple):
    """What one rank says before a step. Integers only; see `engine.step_sync` for how they are synced on.

    tokens:   tokens this rank brings
    phase:    0 no tokens, 1 decode, 2 prefill
    near_tie_tokens: of the sequence whose near-tie is decided next, 0 if none
    received: commands received so far
    executed: how many of them are executed
    digest:   of the tokens sampled so far: ranks of one DP group must agree
    leaving:  1 when told to shut down
    """

    tokens: int = 0
    phase: int = 0
    near_tie_tokens: int = 0
    received: int = 0
    executed: int = 0
    digest: int = 0
    leaving: int = 0


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
        record = self._look(rank)
        for _ in range(LOOKS):
            if record is not None:
                return record
            record = self._look(rank)
        began = time.monotonic()
        while record is None:
            waited = time.monotonic() - began
            if waited < AWAKE:
                os.sched_yield()
            else:
                time.sleep(min(waited / 8, LONGEST_NAP))
            record = self._look(rank)
        return record

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
