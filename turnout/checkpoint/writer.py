"""Write a checkpoint folder: all of it or nothing that loads, with no more memory than one tensor.

* `new_folder(out)` gives OUT.partial and renames it to OUT only when everything is written. Weights
  carry another suffix until then and config.json is written last, so that a run that was killed leaves
  a folder that no engine takes for a model; the next run clears it.
* `ShardWriter` knows every tensor's place from the start (safetensors puts all offsets into the header),
  so that tensors, or parts of them, are written as they are computed, straight to where they belong.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turnout.checkpoint.headers import DTYPES, torch_dtype
from turnout.checkpoint.names import INDEX, SINGLE
from turnout.errors import UserError

UNFINISHED = ".partial"
_DTYPE_NAMES = {torch_dtype(name): name for name in DTYPES}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def new_folder(out: Path, *, needed_bytes: int) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the block ends well and is removed when it does not.

    Raises UserError if `out` exists, is being written by another run, cannot be written, or lies on a
    disk with less than `needed_bytes` free.
    """
    if os.path.lexists(out):
        raise UserError(f"{out} exists already; name a new folder, or remove it first")
    partial = out.with_name(out.name + UNFINISHED)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = _lock(partial, out)
        try:
            _clear(partial)
            _require_space(partial, out, needed_bytes)
            yield partial
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except OSError as error:
        what = f" ({error.filename})" if error.filename else ""
        raise UserError(f"cannot write {out}: {error.strerror or error}{what}") from error


class ShardWriter:
    """The `*.safetensors` files of one folder and their index.

    `groups` are the tensors in the order of the files; a group is never split over two of them. A file has
    more than `shard_bytes` only if a single group has. It is open from its first tensor to its last, so
    whoever writes in that order has one open. Threads may write different tensors at once.
    """

    def __init__(self, folder: Path, groups: Sequence[Sequence[Entry]], shard_bytes: int):
        self._folder = folder
        self._shards = _assign(groups, shard_bytes)
        self._names = _file_names(len(self._shards))
        self._places = {e.name: (i, e) for i, shard in enumerate(self._shards) for e in shard}
        self._written = dict.fromkeys(self._places, 0)
        self._pending = [{entry.name for entry in shard} for shard in self._shards]
        self._open: dict[int, _Shard] = {}
        self._lock = threading.Lock()

    @property
    def files(self) -> list[list[Entry]]:
        """The tensors of each file."""
        return self._shards

    def write(self, name: str, tensor: Tensor, *, first: int = 0) -> None:
        """A whole tensor, or its entries from `first` of the leading dimension on."""
        index, entry = self._places[name]
        shape = entry.shape if tensor.shape == entry.shape else (len(tensor), *entry.shape[1:])
        if tensor.dtype != entry.dtype or tensor.shape != shape:
            raise ValueError(f"{entry} was announced, but {tensor.dtype} {tuple(tensor.shape)} is written")
        stride = entry.nbytes // entry.shape[0] if first else 0
        data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._shard(index).write(name, first * stride, data)
        with self._lock:
            self._written[name] += len(data)
            if self._written[name] >= entry.nbytes:
                self._pending[index].discard(name)
            done = None if self._pending[index] else self._open.pop(index, None)
        if done is not None:
            done.close()

    def finish(self) -> None:
        """Give all files their names, write the index if there is more than one."""
        missing = [name for name, done in self._written.items() if done != self._places[name][1].nbytes]
        if missing:
            raise ValueError(f"{len(missing)} tensors are not complete, the first being {missing[0]}")
        for name in self._names:
            (self._folder / (name + UNFINISHED)).rename(self._folder / name)
        if len(self._shards) > 1:
            total = sum(entry.nbytes for _, entry in self._places.values())
            weight_map = {name: self._names[index] for name, (index, _) in sorted(self._places.items())}
            write_json(self._folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def _shard(self, index: int) -> _Shard:
        with self._lock:
            if not self._pending[index]:
                raise ValueError(f"{self._names[index]} is finished; each tensor is written once")
            if index not in self._open:
                path = self._folder / (self._names[index] + UNFINISHED)
                self._open[index] = _Shard(path, self._shards[index])
            return self._open[index]


class _Shard:
    """One file being written: header first, tensors in any order after it."""

    def __init__(self, path: Path, entries: Sequence[Entry]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # Widest dtypes first, as the safetensors library does, so that every tensor is aligned.
        for entry in sorted(entries, key=lambda e: (-e.dtype.itemsize, e.name)):
            start, end = end, end + entry.nbytes
            header[entry.name] = {
                "dtype": _DTYPE_NAMES[entry.dtype],
                "shape": entry.shape,
                "data_offsets": (start, end),
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        self._starts = {entry.name: header[entry.name]["data_offsets"][0] for entry in entries}
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.truncate(self._file, self._data + end)
            self._write_at(0, memoryview(len(text).to_bytes(8, "little") + text))
        except BaseException:
            os.close(self._file)
            raise

    def write(self, name: str, offset: int, data: memoryview) -> None:
        self._write_at(self._data + self._starts[name] + offset, data)

    def close(self) -> None:
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def _write_at(self, offset: int, data: memoryview) -> None:
        while data:
            done = os.pwrite(self._file, data, offset)
            data, offset = data[done:], offset + done


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _assign(groups: Sequence[Sequence[Entry]], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    room = shard_bytes
    for group in groups:
        size = sum(entry.nbytes for entry in group)
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].extend(group)
        room -= size
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _lock(partial: Path, out: Path) -> int:
    """Hold `partial` for this process; the lock goes with the process, however that ends."""
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{out} is being written by another run") from None
    return descriptor


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _require_space(folder: Path, out: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{out} needs {needed / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB free; "
            "make room, or write to another disk"
        )
