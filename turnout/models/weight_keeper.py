"""A process that holds the prepared weights of one rank in a GPU's memory.

It lends them to that rank and, when it has died, to the next one, which then reads none.

The keeper allocates, and a rank copies each part there and lets its own copy go: weights are there once,
and one part of a layer twice while it is handed over. CUDA IPC lends memory of GPUs, a descriptor that of
hosts. A rank may write to what it is lent (no memory is read-only on a GPU): hence small tensors, such as
counters, are copied to memory of its own, scratch memory is never lent, and a sum tells whether anything has
changed since.

A keeper holds weights of one fingerprint and ends when a rank asks for others, for memory that was lent
through IPC comes back only in that way. It computes nothing, and may die at any time. What it lent stays
mapped in the rank, as Linux and its drivers have it, though CUDA does not promise that; the next rank reads
its weights again. What cannot be lent stays with the rank that made it.

A rank makes a connection through the keeper's door, a descriptor that it has from whoever started both
(engine/fork_server.py). When the door ends the keeper does.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, UntypedStorage

from turnout.models.prepared import UNPICKLED, as_bytes, named, pickled, size_of, unpickled
from turnout.parallel.groups import Groups

T = TypeVar("T")

OWN_BYTES = 1 << 16  # tensors of less memory are copied
SEGMENT = 1 << 29  # bytes that the keeper takes of a GPU at a time: a rank maps segments, not parts
ANSWER_SECONDS = 30.0  # to open a GPU takes the keeper some

log = logging.getLogger(__name__)


class KeeperError(Exception):
    """What was asked for cannot be had."""


# Of a keeper that does not answer, has no memory or ends, and of a device that maps none.
FAILURES = (KeeperError, RuntimeError, OSError, EOFError)


# The keeper's side


@dataclass(frozen=True, eq=False)
class Block:
    """Memory, and what another process needs to map it: of a GPU torch's handle, else its size."""

    storage: UntypedStorage
    handle: Any

    @classmethod
    def on(cls, device: torch.device, size: int) -> Block:
        """Raises RuntimeError."""
        if device.type == "cpu":
            return cls(UntypedStorage._new_using_fd_cpu(size), size)
        _reserve(device, size)
        storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        *handle, _ = storage._share_cuda_()
        _forget_counters(handle[4])
        return cls(storage, (*handle, False))  # whoever maps it need not wait: nothing is written here


def _reserve(device: torch.device, size: int) -> None:
    """A segment that torch's allocator cuts blocks from, unless there is room for `size` in one."""
    free = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < size < SEGMENT:
        with suppress(torch.OutOfMemoryError):  # there may be room for the block alone
            torch.empty(SEGMENT, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Part:
    """data: a pickled object. block: the memory of its tensors, if it has any. total: see `_total`."""

    data: bytes
    block: Block | None
    total: int


class WeightKeeper:
    """parts: by key. free: blocks that belong to no part."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.free: list[Block] = []
        self._fingerprint = ""
        self._device = torch.device("cpu")

    def open(self, fingerprint: str, device: str) -> bool:
        """Whether its weights are those that a rank wants."""
        if not self._fingerprint:
            self._fingerprint, self._device = fingerprint, torch.device(device)
        return self._fingerprint == fingerprint

    def lend(self, size: int) -> Block:
        """A block for a part to come, of a dead rank's size if possible. Raises RuntimeError."""
        for block in self.free:
            if block.storage.nbytes() == size:
                self.free.remove(block)
                return block
        return Block.on(self._device, size)

    def forget(self, key: str) -> None:
        part = self.parts.pop(key, None)
        if part is not None and part.block is not None:
            self.free.append(part.block)


class _Visitor:
    """A rank's connection to the keeper. lent: what it has not made a part of yet."""

    def __init__(self, keeper: WeightKeeper, connection: Connection):
        self.connection = connection
        self._keeper = keeper
        self._lent: Block | None = None

    def answer(self) -> bool:
        """One question; False if there will be no more. Ends this process when told to."""
        try:
            what, *given = self.connection.recv()
            if what == "open":
                self._reply(self._keeper.open(*given))
            elif what == "find":
                part = self._keeper.parts.get(*given)
                self._reply(part and (part.data, part.total, part.block and part.block.handle))
                self._send(part.block if part else None)
            elif what == "lend":
                try:
                    self._lent = self._keeper.lend(*given)
                except RuntimeError as error:
                    self.connection.send((False, str(error).partition("\n")[0]))
                else:
                    self._reply(self._lent.handle)
                    self._send(self._lent)
            elif what == "keep":
                key, data, total = given
                self._keeper.parts[key] = Part(data, self._lent, total)
                self._lent = None
                self._reply(None)
            elif what == "forget":
                self._keeper.forget(*given)
                self._reply(None)
            else:
                os._exit(0)
        except (EOFError, OSError):
            if self._lent is not None:
                self._keeper.free.append(self._lent)
            self.connection.close()
            return False
        return True

    def _reply(self, value: object) -> None:
        self.connection.send((True, value))

    def _send(self, block: Block | None) -> None:
        """The descriptor of memory of the host."""
        if block is not None and block.storage.device.type == "cpu":
            descriptor, _ = block.storage._share_fd_cpu_()
            send_handle(self.connection, descriptor, os.getpid())


def run(door: Connection) -> NoReturn:
    """Be a keeper until `door` ends."""
    keeper = WeightKeeper()
    visitors: dict[Connection, _Visitor] = {}
    while True:
        for ready in wait([door, *visitors]):
            if ready is door:
                try:
                    connection = Connection(recv_handle(door))
                except (EOFError, OSError):
                    sys.stderr.flush()
                    os._exit(0)
                visitors[connection] = _Visitor(keeper, connection)
            elif isinstance(ready, Connection) and not visitors[ready].answer():
                del visitors[ready]


# The rank's side


class KeptWeights:
    """One rank's weights with its keeper; a `Prepared`. Once the keeper fails all is made, and stays here."""

    def __init__(self, door: int, fingerprint: str, groups: Groups, device: torch.device):
        """door: a descriptor, closed here. fingerprint: of all that prepared weights depend on."""
        self._groups, self._device = named(groups), device
        self.found = self.made = 0
        self._keeper: Connection | None = None
        try:
            with Connection(door) as outside:
                ours, theirs = Pipe()
                with theirs:
                    send_handle(outside, theirs.fileno(), None)
            self._keeper = ours
            if not self._ask("open", fingerprint, str(device)):
                self._dismiss(KeeperError("it holds other weights"))
        except FAILURES as error:
            self._give_up(error)

    def keep(self, key: str, make: Callable[[], T]) -> T:
        """See `Prepared`. What cannot be handed over stays where it is."""
        if self._keeper is not None:
            try:
                found = self._find(key)
            except FAILURES as error:
                self._dismiss(error)
            else:
                if found is not None:
                    self.found += 1
                    return found[0]
        made = make()
        self.made += 1
        if self._keeper is None:
            return made
        try:
            data, storages = pickled(made, self._groups)
        except UNPICKLED as error:
            log.warning("%s: not kept for the next rank: %s", key, error)
            return made
        try:
            return self._hand_over(key, data, storages)
        except FAILURES as error:
            self._dismiss(error)
            return made

    def close(self) -> None:
        """All is loaded."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of what was handed over

    def _find(self, key: str) -> tuple[Any] | None:
        """In a tuple, for it may be None. Raises FAILURES."""
        part = self._ask("find", key)
        if part is None:
            return None
        data, total, handle = part
        block = self._map(handle)
        if _total(block) != total:
            log.warning("%s: prepared again: what was kept has changed", key)
            self._ask("forget", key)
            return None
        return (self._unpickled(data, block),)

    def _hand_over(self, key: str, data: bytes, storages: dict[int, UntypedStorage]) -> Any:
        """Raises FAILURES."""
        size, block = size_of(storages), None
        if size:
            try:
                handle = self._ask("lend", size)
            except KeeperError:
                if self._device.type != "cuda":
                    raise
                torch.cuda.empty_cache()  # this process may hold what the keeper lacks
                handle = self._ask("lend", size)
            block = self._map(handle)
            assert block is not None
            for place, storage in storages.items():
                block[place : place + storage.nbytes()].copy_(as_bytes(storage))
        self._ask("keep", key, data, _total(block))
        return self._unpickled(data, block)

    def _map(self, handle: Any) -> Tensor | None:
        """uint8. Raises FAILURES: RuntimeError where there is no IPC."""
        if handle is None:
            return None
        if self._device.type == "cuda":
            return as_bytes(UntypedStorage._new_shared_cuda(*handle))
        assert self._keeper is not None
        descriptor = recv_handle(self._keeper)
        try:
            return as_bytes(UntypedStorage._new_shared_fd_cpu(descriptor, handle))  # type: ignore[attr-defined]
        finally:
            os.close(descriptor)

    def _unpickled(self, data: bytes, block: Tensor | None) -> Any:
        own: dict[int, Tensor] = {}

        def find(place: int, size: int, device: str) -> Tensor:
            assert block is not None
            part = block[place : place + size]
            if size >= OWN_BYTES and device == block.device.type:
                return part
            if place not in own:
                own[place] = part.to(device, copy=True)
            return own[place]

        return unpickled(data, self._groups, find)

    def _ask(self, *question: object) -> Any:
        """Raises KeeperError."""
        if self._keeper is None:
            raise KeeperError("there is none")
        try:
            self._keeper.send(question)
            if not self._keeper.poll(ANSWER_SECONDS):
                raise KeeperError(f"it has not answered for {ANSWER_SECONDS:g} s")
            done, answer = self._keeper.recv()
        except (EOFError, OSError):
            raise KeeperError("it has ended") from None
        if not done:
            raise KeeperError(answer)
        return answer

    def _dismiss(self, why: Exception) -> None:
        """Let the keeper end, so that nothing is held twice, and wait for that."""
        with suppress(KeeperError):
            self._ask("leave")
        self._give_up(why)

    def _give_up(self, why: Exception) -> None:
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        log.warning("this rank's weights are not kept for the next one: %s", str(why).partition("\n")[0])


def _total(block: Tensor | None) -> int:
    """A sum of all words: what has changed hardly has the same."""
    return 0 if block is None else int(block.view(torch.int64).sum())


def _forget_counters(name: bytes) -> None:
    """Torch counts users of lent memory in a file under /dev/shm, which a killed process would leave behind.
    Nothing depends on them: lent memory is not freed before the keeper ends."""
    with suppress(ImportError, OSError):
        import _posixshmem

        _posixshmem.shm_unlink(name.decode())
