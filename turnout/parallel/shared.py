"""Bytes between ranks of one host through shared memory, where sockets would cost most of a small layer.

Each rank has two slots, used in turn. In a round, each writes what it has to give, says which part is for
whom, and then the number of the round; and takes its parts from the slots of all others. No rank can be two
rounds ahead, so the slot being written is one that all have read. What does not fit into a slot takes
several rounds.

The number is written last and read first, which is enough on x86: it keeps the order of stores and of loads.
Elsewhere, and where ranks cannot open each other's memory, they talk over gloo. The memory has no name: it
is gone with the last process that maps it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import platform
import select
import sys
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from turnout.parallel.waiting import pauses

WORD = 8  # bytes: all numbers are int64
SLOT = 4 << 20  # bytes of a slot's payload; memory is taken when first written
PATIENCE = 50e-3  # seconds before looking whether a rank has ended

SUPPORTED = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def create(size: int, slot: int = SLOT) -> int:
    """A descriptor of memory for `size` ranks."""
    descriptor = os.memfd_create("turnout-ranks")
    os.ftruncate(descriptor, 2 * size * (_header_bytes(size) + slot))
    return descriptor


def identity(descriptor: int) -> tuple[int, int]:
    """What tells this memory from any other file; zeros for no descriptor."""
    if descriptor < 0:
        return 0, 0
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def attach(made: Sequence[int], rank: int, processes: Sequence[int]) -> SharedMemory | None:
    """This rank's view of what another has made, or None if it cannot see it.

    made: its process, descriptor and the two numbers of `identity`. processes: ids of all ranks.
    """
    process, descriptor, *expected = made
    if descriptor < 0 or not SUPPORTED:
        return None
    try:
        mine = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if list(identity(mine)) != expected:  # another process of that number, in another namespace
                return None
            return SharedMemory(mine, rank, processes)
        finally:
            os.close(mine)
    except OSError:
        return None


class SharedMemory:
    """One rank's view of the memory that a rank made with `create`; all use the same `slot`."""

    def __init__(self, descriptor: int, rank: int, processes: Sequence[int], slot: int = SLOT) -> None:
        """processes: ids of all ranks, by which the end of one is noticed. OSError: the kernel denies it."""
        self._rank, self._size, self._slot = rank, len(processes), slot
        self._number = 0
        self._ends = select.poll()
        watched: list[int] = []
        weakref.finalize(self, _close, watched)
        for process in processes:
            watched.append(os.pidfd_open(process))
            self._ends.register(watched[-1], select.POLLIN)
        header = _header_bytes(self._size)
        memory = mmap.mmap(descriptor, 2 * self._size * (header + slot))
        whole = memoryview(memory)
        self._headers, self._payloads = [], []
        for place in range(2 * self._size):
            start = place * (header + slot)
            self._headers.append(whole[start : start + header].cast("q"))
            self._payloads.append(
                torch.frombuffer(memory, dtype=torch.uint8, count=slot, offset=start + header)
            )

    def move(self, own_B: Tensor, spans: Sequence[tuple[int, int]], out_B: Tensor) -> None:
        """Everyone's bytes for this rank, one rank after another, into `out_B`; collective.

        own_B: uint8, contiguous; bytes [begin, end) of it are for rank i if spans[i] says so. Spans may
        overlap. Raises ConnectionError if a rank ends before it has given its part.
        """
        sizes, starts = [0] * self._size, [0] * self._size
        for window in itertools.count():
            most = self._round(own_B, spans, out_B, window * self._slot, sizes, starts)
            if most <= (window + 1) * self._slot:
                return

    def _round(
        self,
        own_B: Tensor,
        spans: Sequence[tuple[int, int]],
        out_B: Tensor,
        shown: int,
        sizes: list[int],
        starts: list[int],
    ) -> int:
        """Show bytes from `shown` on, and take what others show; the most bytes that any rank has.

        sizes, starts: how many bytes each rank has for this one, and where they go; made in the first round.
        """
        self._number += 1
        piece_B = own_B[shown : shown + self._slot]
        header = self._header(self._rank)
        self._payload(self._rank)[: len(piece_B)].copy_(piece_B)
        header[1] = len(own_B)
        for place, bound in enumerate(itertools.chain.from_iterable(spans), start=2):
            header[place] = bound
        header[0] = self._number
        most = 0
        at = 2 + 2 * self._rank
        if shown == 0:
            for rank in range(self._size):
                theirs = self._wait(rank)
                sizes[rank] = theirs[at + 1] - theirs[at]
            starts[:] = itertools.accumulate([0, *sizes[:-1]])
        for rank in range(self._size):
            theirs = self._wait(rank)
            most = max(most, theirs[1])
            begin, end = max(theirs[at], shown), min(theirs[at + 1], shown + self._slot)
            if begin < end:
                to = starts[rank] + begin - theirs[at]
                out_B[to : to + end - begin].copy_(self._payload(rank)[begin - shown : end - shown])
        return most

    def _header(self, rank: int) -> memoryview:
        """Number of the round, bytes in all, then begin and end for each rank."""
        return self._headers[2 * rank + self._number % 2]

    def _payload(self, rank: int) -> Tensor:
        return self._payloads[2 * rank + self._number % 2]

    def _wait(self, rank: int) -> memoryview:
        """The header of `rank` in this round, once it is there."""
        header, number = self._header(rank), self._number
        for waited in pauses():
            if header[0] == number:
                break
            if waited > PATIENCE and self._ends.poll(0) and header[0] != number:
                raise ConnectionError("a rank that this one was waiting for has ended")
        return header


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _header_bytes(size: int) -> int:
    """Up to a cache line, so that payloads begin at one."""
    return -(-WORD * (2 + 2 * size) // 64) * 64
