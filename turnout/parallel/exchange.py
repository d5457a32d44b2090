"""The step exchange: before each step all ranks tell each other a small fixed record.

On one host it goes through shared memory, a file that all ranks map: each rank has two slots, used in
turn, and writes its record with the number of the exchange. Nobody can be two exchanges ahead, so the slot
being written is one that everybody has read. A checksum over record and number tells a slot that is only
half written, on any processor. Between hosts it goes through a process group.

The wait spins first, then yields, then sleeps: on a busy host with fewer cores than ranks the ranks waited
for need the cores.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

SLOT = 128  # bytes: apart by more than a cache line
SPINS, YIELDS = 50, 200  # looks before yielding, and before sleeping
NAP = 50e-6  # seconds


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one rank says before a step. Integers only; see `engine.lockstep` for how they are agreed on.

    tokens:   tokens this rank brings
    phase:    0 no tokens, 1 decode, 2 prefill
    settle:   tokens of a sequence whose close call is to be settled next, 0 if none
    received: commands received so far
    digest:   of the tokens sampled so far: ranks of one DP group must agree
    leaving:  1 when told to shut down
    """

    tokens: int = 0
    phase: int = 0
    settle: int = 0
    received: int = 0
    digest: int = 0
    leaving: int = 0

    @classmethod
    def of(cls, values: Sequence[int]) -> StepRecord:
        """The record of which `values` are the fields, in order."""
        return cls(**dict(zip(cls.__dataclass_fields__, values, strict=True)))


FIELDS = struct.Struct("<6q")
NUMBER = struct.Struct("<q")
CHECK = struct.Struct("<I")


class StepExchange(Protocol):
    def __call__(self, record: StepRecord) -> list[StepRecord]:
        """Everyone's record of this exchange, by rank; returns when all have come."""
        ...


class Alone:
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
        payload = NUMBER.pack(self._number) + FIELDS.pack(*astuple(record))
        at = self._slot(self._rank)
        self._memory[at : at + len(payload) + CHECK.size] = payload + CHECK.pack(zlib.crc32(payload))
        return [record if rank == self._rank else self._wait(rank) for rank in range(self._size)]

    def _slot(self, rank: int) -> int:
        return (2 * rank + self._number % 2) * SLOT

    def _wait(self, rank: int) -> StepRecord:
        at, looks = self._slot(rank), 0
        end = at + NUMBER.size + FIELDS.size
        while True:
            if NUMBER.unpack_from(self._memory, at)[0] == self._number:
                payload = self._memory[at:end]
                if CHECK.unpack_from(self._memory, end)[0] == zlib.crc32(payload):
                    return StepRecord.of(FIELDS.unpack_from(payload, NUMBER.size))
            looks += 1
            if looks > YIELDS:
                time.sleep(NAP)
            elif looks > SPINS:
                os.sched_yield()
