"""Prepared weights in memory that all ranks of a host map, and that outlives them, for the next ones to find.

The memory has no name: it is gone with the last process that holds it. It is a sequence of records, each an
object under a key, pickled but for its tensors: these follow as they lie in memory, and are mapped. What a
process writes to them is its own. Keys hold whatever the object depends on, beginning with the stamp of the
checkpoint, so that other weights are other records. For CPUs only.
"""

from __future__ import annotations

import fcntl
import importlib
import io
import logging
import mmap
import os
import pickle
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, UntypedStorage

from turnout.parallel.groups import SINGLE_RANK, Group, Groups

T = TypeVar("T")

PAGE = mmap.ALLOCATIONGRANULARITY
ALIGNED = 64  # bytes, of each tensor's memory
WORD = struct.Struct("<Q")
HEADER = struct.Struct("<QQQ")  # bytes of a record, of its key, and of its pickled object

log = logging.getLogger(__name__)


class SharedWeights:
    """One rank's view of the memory."""

    def __init__(self, descriptor: int, stamp: str, groups: Groups):
        """descriptor: of the memory, empty at first. groups: for the objects that hold some of them."""
        # Opened anew, for a lock belongs to what was opened, and copies of a descriptor are one of these.
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = stamp
        self._groups = {
            (whose, field.name): getattr(owner, field.name)
            for whose, owner in (("model", groups), ("single", SINGLE_RANK))
            for field in fields(owner)
            if isinstance(getattr(owner, field.name), Group)
        }
        self._records: dict[str, int] = {}
        self._read_to = PAGE  # the first page tells where the records end
        self.found = 0

    def keep(self, key: str, make: Callable[[], T]) -> T:
        """What an earlier call, perhaps of another process, made under this key; or what `make` gives, from
        then on in the shared memory. What cannot be pickled stays where it is."""
        key = f"{self._stamp} {key}"
        at = self._find(key)
        if at is None:
            made = make()
            try:
                pickled, storages = self._pickle(made)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                log.warning("%s: not shared between ranks: %s", key, error)
                return made
            with self._locked():
                at = self._find(key)
                if at is None:
                    at = self._append(key, pickled, storages)
        else:
            self.found += 1
        return self._map(at)

    def _find(self, key: str) -> int | None:
        """Where the record begins, if there is one by now."""
        end = WORD.unpack(os.pread(self._descriptor, WORD.size, 0).ljust(WORD.size, b"\0"))[0]
        while self._read_to < end:
            size, key_size, _ = self._header(self._read_to)
            name = os.pread(self._descriptor, key_size, self._read_to + HEADER.size)
            self._records[name.decode()] = self._read_to
            self._read_to += size
        return self._records.get(key)

    def _append(self, key: str, pickled: bytes, storages: dict[int, UntypedStorage]) -> int:
        """storages: by where each begins behind the pickled object."""
        at, name = self._read_to, key.encode()
        start = _aligned(HEADER.size + len(name) + len(pickled), ALIGNED)
        end = max((start + place + storage.nbytes() for place, storage in storages.items()), default=start)
        size = _aligned(end, PAGE)
        os.ftruncate(self._descriptor, at + size)
        with mmap.mmap(self._descriptor, size, offset=at) as memory:
            head = HEADER.pack(size, len(name), len(pickled)) + name + pickled
            memory[: len(head)] = head
            for place, storage in storages.items():
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                memory[start + place : start + place + storage.nbytes()] = whole.numpy().data
        os.pwrite(self._descriptor, WORD.pack(at + size), 0)  # last: what is not complete does not count
        return at

    def _map(self, at: int) -> Any:
        size, key_size, pickled_size = self._header(at)
        memory = mmap.mmap(self._descriptor, size, access=mmap.ACCESS_COPY, offset=at)
        end = HEADER.size + key_size + pickled_size
        pickled = memory[end - pickled_size : end]
        return _Unpickler(pickled, memory, _aligned(end, ALIGNED), self._groups).load()

    def _header(self, at: int) -> tuple[int, int, int]:
        size, key_size, pickled_size = HEADER.unpack(os.pread(self._descriptor, HEADER.size, at))
        return size, key_size, pickled_size

    def _pickle(self, made: object) -> tuple[bytes, dict[int, UntypedStorage]]:
        file = io.BytesIO()
        pickler = _Pickler(file, self._groups)
        pickler.dump(made)
        return file.getvalue(), pickler.storages

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; the lock of one that ends is free."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class _Pickler(pickle.Pickler):
    """Leaves out groups of ranks, modules, and the memory of tensors. storages: that memory, by its place."""

    def __init__(self, file: io.BytesIO, groups: dict[tuple[str, str], Group]):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: dict[int, UntypedStorage] = {}
        self._places: dict[int, int] = {}  # by address: tensors may be views of the same memory
        self._end = 0
        self._names = {id(group): name for name, group in reversed(groups.items())}

    def persistent_id(self, thing: object) -> tuple[Any, ...] | None:
        if isinstance(thing, Tensor):
            layout = (thing.dtype, tuple(thing.shape), thing.stride(), thing.storage_offset())
            return "tensor", self._place(thing.untyped_storage()), thing.untyped_storage().nbytes(), *layout
        if isinstance(thing, Group):
            return "group", self._names[id(thing)]
        if isinstance(thing, ModuleType):
            return "module", thing.__name__
        return None

    def _place(self, storage: UntypedStorage) -> int:
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._places and size:
            self._places[address] = self._end
            self.storages[self._end] = storage
            self._end = _aligned(self._end + size, ALIGNED)
        return self._places[address] if size else 0


class _Unpickler(pickle.Unpickler):
    """memory: of the record. start: where its tensors begin."""

    def __init__(self, pickled: bytes, memory: mmap.mmap, start: int, groups: dict[tuple[str, str], Group]):
        super().__init__(io.BytesIO(pickled))
        self._memory, self._start, self._groups = memory, start, groups

    def persistent_load(self, saved: tuple[Any, ...]) -> Any:
        kind, what, *rest = saved
        if kind == "group":
            return self._groups[what]
        if kind == "module":
            return importlib.import_module(what)
        size, dtype, shape, stride, offset = rest
        if not size:
            return torch.empty_strided(shape, stride, dtype=dtype)
        mapped = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._start + what)
        return torch.empty(0, dtype=dtype).set_(mapped.untyped_storage(), offset, shape, stride)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
