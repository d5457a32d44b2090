"""Prepared weights as bytes: how ranks take over from each other what one of them has read and laid out.

An object is pickled, but for its tensors, whose memory is one block next to it, and for what a rank has
anyway: groups of ranks, modules, scratch memory.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage

from turnout.moe import arena
from turnout.parallel.groups import SINGLE_RANK, Group, Groups

T = TypeVar("T")

ALIGNED = 64  # bytes, of each tensor's memory
UNPICKLED = (pickle.PicklingError, TypeError, AttributeError)  # what `pickled` raises

Named = dict[tuple[str, str], Group]
# uint8 [size] from `place` of the block on, for a tensor that was on a device of this type.
Find = Callable[[int, int, str], Tensor]


class Prepared(Protocol):
    """Weights that earlier ranks may have prepared. found, made: how many parts were, and were not."""

    found: int
    made: int

    def keep(self, key: str, make: Callable[[], T]) -> T:
        """What an earlier call, perhaps of another process, made under this key; or what `make` gives, from
        then on to be found."""
        ...

    def close(self) -> None:
        """No more is to be kept."""
        ...


def named(groups: Groups) -> Named:
    """Groups as each rank calls them."""
    return {
        (whose, field.name): getattr(owner, field.name)
        for whose, owner in (("model", groups), ("single", SINGLE_RANK))
        for field in fields(owner)
        if isinstance(getattr(owner, field.name), Group)
    }


def pickled(made: object, groups: Named) -> tuple[bytes, dict[int, UntypedStorage]]:
    """An object, and the memory of its tensors by its place in the block. Raises UNPICKLED."""
    file = io.BytesIO()
    pickler = _Pickler(file, groups)
    pickler.dump(made)
    return file.getvalue(), pickler.storages


def unpickled(data: bytes, groups: Named, find: Find) -> Any:
    return _Unpickler(data, groups, find).load()


def size_of(storages: dict[int, UntypedStorage]) -> int:
    """Bytes of a block."""
    return max((aligned(place + s.nbytes(), ALIGNED) for place, s in storages.items()), default=0)


def as_bytes(storage: UntypedStorage) -> Tensor:
    """uint8, all of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def aligned(size: int, to: int) -> int:
    return -(-size // to) * to


class _Pickler(pickle.Pickler):
    """storages: of tensors, by place."""

    def __init__(self, file: io.BytesIO, groups: Named):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: dict[int, UntypedStorage] = {}
        self._places: dict[int, int] = {}  # by address: tensors may be views of the same memory
        self._end = 0
        self._names = {id(group): name for name, group in reversed(groups.items())}

    def persistent_id(self, thing: object) -> tuple[Any, ...] | None:
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            layout = thing.storage_offset(), tuple(thing.shape), thing.stride(), thing.dtype
            scratch = arena.holding(thing)
            if scratch is not None:
                return "scratch", scratch, *layout
            return "tensor", self._place(storage), storage.nbytes(), storage.device.type, *layout
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
            self._end = aligned(self._end + size, ALIGNED)
        return self._places[address] if size else 0


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, groups: Named, find: Find):
        super().__init__(io.BytesIO(data))
        self._groups, self._find = groups, find

    def persistent_load(self, saved: tuple[Any, ...]) -> Any:
        kind, what, *rest = saved
        if kind == "group":
            return self._groups[what]
        if kind == "module":
            return importlib.import_module(what)
        if kind == "scratch":
            return what.view(*rest)
        size, device, offset, shape, stride, dtype = rest
        if not size:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        found = self._find(what, size, device)
        offset += found.storage_offset() // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=found.device).set_(
            found.untyped_storage(), offset, shape, stride
        )
