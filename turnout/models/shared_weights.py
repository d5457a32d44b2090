"""Prepared weights in memory that all ranks of a host map, and that outlives them, for the next ones to find.

The memory has no name: it is gone with the last process that holds it. It is a sequence of records, each an
object under a key, pickled but for its tensors: these follow as they lie in memory, and are mapped. What a
process writes to them is its own. Keys hold whatever the object depends on, beginning with the stamp of the
checkpoint, so that other weights are other records. For CPUs only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage

from turnout.models.prepared import ALIGNED, UNPICKLED, aligned, as_bytes, named, pickled, size_of, unpickled
from turnout.parallel.groups import Groups

T = TypeVar("T")

PAGE = mmap.ALLOCATIONGRANULARITY
WORD = struct.Struct("<Q")
HEADER = struct.Struct("<QQQ")  # bytes of a record, of its key, and of its pickled object

TOO_LARGE = (
    "files may not be as large as the weights (`ulimit -f`): ranks do not share them, and read them again "
    "when they restart"
)

log = logging.getLogger(__name__)


class SharedWeights:
    """One rank's view of the memory."""

    def __init__(self, descriptor: int, stamp: str, groups: Groups):
        """descriptor: of the memory, empty at first. groups: for the objects that hold some of them."""
        # Opened again, for a lock belongs to what was opened, and copies of a descriptor are one of these.
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = stamp
        self._groups = named(groups)
        self._records: dict[str, int] = {}
        self._read_to = PAGE  # the first page tells where the records end
        self.found = self.made = 0
        self._full = False  # the limit of a file's size is reached

    def keep(self, key: str, make: Callable[[], T]) -> T:
        """What an earlier call, perhaps of another process, made under this key; or what `make` gives, from
        then on in the shared memory. What cannot be pickled stays where it is, and so does everything once a
        limit leaves the memory too small."""
        key = f"{self._stamp} {key}"
        at = self._find(key)
        if at is None:
            made = make()
            self.made += 1
            if self._full:
                return made
            try:
                data, storages = pickled(made, self._groups)
            except UNPICKLED as error:
                log.warning("%s: not shared between ranks: %s", key, error)
                return made
            with self._locked():
                at = self._find(key)
                try:
                    at = self._append(key, data, storages) if at is None else at
                except OSError as error:
                    if error.errno != errno.EFBIG:
                        raise
                    self._full = True
                    log.warning(TOO_LARGE)
                    return made
        else:
            self.found += 1
        return self._map(at)

    def close(self) -> None:
        """What is mapped stays."""

    def _find(self, key: str) -> int | None:
        """Where the record begins, if there is one by now."""
        end = WORD.unpack(os.pread(self._descriptor, WORD.size, 0).ljust(WORD.size, b"\0"))[0]
        while self._read_to < end:
            size, key_size, _ = self._header(self._read_to)
            name = os.pread(self._descriptor, key_size, self._read_to + HEADER.size)
            self._records[name.decode()] = self._read_to
            self._read_to += size
        return self._records.get(key)

    def _append(self, key: str, data: bytes, storages: dict[int, UntypedStorage]) -> int:
        """storages: by where each begins behind the pickled object."""
        at, name = self._read_to, key.encode()
        start = aligned(HEADER.size + len(name) + len(data), ALIGNED)
        size = aligned(start + size_of(storages), PAGE)
        os.ftruncate(self._descriptor, at + size)
        with mmap.mmap(self._descriptor, size, offset=at) as memory:
            head = HEADER.pack(size, len(name), len(data)) + name + data
            memory[: len(head)] = head
            for place, storage in storages.items():
                memory[start + place : start + place + storage.nbytes()] = as_bytes(storage).numpy().data
        os.pwrite(self._descriptor, WORD.pack(at + size), 0)  # last: what is not complete does not count
        return at

    def _map(self, at: int) -> Any:
        size, key_size, data_size = self._header(at)
        memory = mmap.mmap(self._descriptor, size, access=mmap.ACCESS_COPY, offset=at)
        end = HEADER.size + key_size + data_size
        start = aligned(end, ALIGNED)

        def find(place: int, size: int, device: str) -> Tensor:
            return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start + place)

        return unpickled(memory[end - data_size : end], self._groups, find)

    def _header(self, at: int) -> tuple[int, int, int]:
        size, key_size, data_size = HEADER.unpack(os.pread(self._descriptor, HEADER.size, at))
        return size, key_size, data_size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; the lock of one that ends is free."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
