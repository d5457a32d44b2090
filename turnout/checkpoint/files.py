"""Tensors of one folder by name, their bytes read straight to where they go.

Tensors are read with `readinto` rather than through a memory map: the bytes land in the preallocated
weights without a second copy, mapped pages never count towards this process's memory, and a file that
shrinks while it is read is an error instead of a SIGBUS.

Floats are checked to be finite as they arrive, while they are still in the CPU's cache: a NaN that loads
would otherwise answer nonsense long after anyone could say where it came from.
"""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from turnout.checkpoint.errors import CheckpointError
from turnout.checkpoint.headers import TensorMeta, open_folder

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
T = TypeVar("T")
ProgressFn = Callable[[str, int, int], None]  # (tensor, bytes done, bytes in all)

_CHUNK_BYTES = 1 << 24
_CHECKED_BYTES = 1 << 18  # read and checked at once: what a core's own cache holds
_PIECE_BYTES = 1 << 22  # of a tensor or of a stack of them, for one of several threads
_SHARED_BYTES = 1 << 23  # from which on several threads read
_THREADS = 16  # at most: what lies in memory is read at 1 to 2 GB/s by one

# By dtype, unsigned integers of its size, and the smallest that twice the bits of a NaN or an infinity give:
# doubling drops the sign, and an exponent of ones then stands on top. e4m3 has only NaNs.
# e8m0, which has no sign, is only ever a scale: `parts.E8M0_SCALE` checks it.
_NOT_FINITE: dict[torch.dtype, tuple[type[np.unsignedinteger], int]] = {
    torch.float64: (np.uint64, 0xFFE0_0000_0000_0000),
    torch.float32: (np.uint32, 0xFF00_0000),
    torch.bfloat16: (np.uint16, 0xFF00),
    torch.float16: (np.uint16, 0xF800),
    torch.float8_e5m2: (np.uint8, 0xF8),
    torch.float8_e4m3fn: (np.uint8, 0xFE),
}


class TensorFiles:
    """All tensors of a checkpoint folder by name, for several threads.

    pinned: `empty` gives page-locked memory, from which a GPU copies at full speed.

    `progress(what, done, total)` hears of each tensor once, when it has been read or set aside, with the
    bytes of the checkpoint dealt with so far.
    """

    def __init__(self, folder: Path, progress: ProgressFn | None = None):
        self.folder = folder
        self.pinned = False
        self._metas = open_folder(folder)
        self._sorted = sorted(self._metas)
        self._files: dict[Path, int] = {}  # open descriptors
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self._progress = progress
        self._total = sum(meta.nbytes for meta in self._metas.values())
        self._done = 0
        self._pending = set(self._metas)  # neither read nor set aside yet

    def __contains__(self, name: str) -> bool:
        return name in self._metas

    def __iter__(self) -> Iterator[str]:
        return iter(self._metas)

    def rename(self, pairs: Sequence[tuple[str, str]]) -> None:
        """`re.sub` of every name, pair by pair; raises CheckpointError where two tensors get one name."""
        found: dict[str, TensorMeta] = {}
        for old, meta in self._metas.items():
            name = old
            for pattern, replacement in pairs:
                name = re.sub(pattern, replacement, name)
            if name in found:
                raise CheckpointError(f"and {old} are one tensor by two names", file=meta.file, tensor=name)
            found[name] = meta
        self._metas, self._sorted, self._pending = found, sorted(found), set(found)

    @property
    def nbytes(self) -> int:
        return self._total

    def under(self, start: str) -> list[str]:
        """All names that begin with `start`, sorted."""
        first = bisect_left(self._sorted, start)
        last = bisect_left(self._sorted, start + chr(0x10FFFF), lo=first)
        return self._sorted[first:last]

    def unread(self) -> list[str]:
        """Tensors that were neither read nor set aside, sorted."""
        return sorted(self._pending)

    def set_aside(self, names: Iterable[str]) -> None:
        """Count tensors as dealt with, for progress and `unread`: read here, or another rank's."""
        with self._lock:
            for name in names:
                if name in self._pending:
                    self._pending.discard(name)
                    self._done += self._metas[name].nbytes
                    if self._progress is not None:
                        self._progress(name, self._done, self._total)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory on the host; pinned where tensors are copied to a GPU once they are read."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.pinned)

    def read_stacked(
        self,
        names: Sequence[str],
        out: Tensor,
        *,
        holds: Callable[[Tensor], bool] | None = None,
        check: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        """`read_into` for each name and its entry of `out`, then `check`, by several threads.

        holds: whether `check` would take these elements, of whichever tensors. Tensors of the dtype of
        `out`, contiguous on the CPU, are read and checked many at a time; where that fails, once more and
        one by one, for the error to name the first. Threads share the tensors, or each of a few large ones.
        """

        def one_by_one(run: slice) -> None:
            for name, value in zip(names[run], out[run], strict=True):
                self.read_into(name, value)
                if check is not None:
                    check(name, value)

        each = out[0].nbytes
        plain = out.device.type == "cpu" and out.is_contiguous()
        large = each >= _SHARED_BYTES and len(names) < 4 * _THREADS
        if not plain or not each or large or (check is not None and holds is None):
            one_by_one(slice(None))
            return
        step = max(1, _PIECE_BYTES // each)
        runs = [slice(first, first + step) for first in range(0, len(names), step)]

        def read(run: slice) -> None:
            try:
                sound = self._read_run(names[run], out[run], holds)
            except OSError:
                sound = False
            if not sound:
                one_by_one(run)

        if out.nbytes < _SHARED_BYTES:
            for run in runs:
                read(run)
        else:
            _share(read, runs)

    def read_scalars(self, names: Sequence[str], dtypes: Iterable[torch.dtype]) -> Tensor | None:
        """[len(names)] of tensors of one number each, all of the first one's dtype, one of `dtypes`.

        None, and nothing counts as read, where they are something else or one cannot be read: `expect` and
        `read_into` tell why. Numbers may be NaN or infinite.
        """
        metas = [self._metas.get(name) for name in names]
        first = metas[0]
        if first is None or first.dtype not in tuple(dtypes):
            return None
        stored, size, path, file, numbers = first.stored, first.dtype.itemsize, None, -1, []
        try:
            for meta in metas:
                if meta is None or meta.stored != stored or meta.shape not in ((), (1,)):
                    return None
                if meta.file is not path:
                    path, file = meta.file, self._open(meta.file)
                numbers.append(os.pread(file, size, meta.offset))
        except OSError:
            return None
        if any(len(number) < size for number in numbers):
            return None
        self.set_aside(names)
        return torch.frombuffer(bytearray(b"".join(numbers)), dtype=first.dtype)

    def find(self, name: str) -> TensorMeta | None:
        return self._metas.get(name)

    def meta(self, name: str, *, why: str = "") -> TensorMeta:
        """Raises CheckpointError when there is no such tensor; `why` says who needs it."""
        if name not in self._metas:
            raise CheckpointError("is missing", file=self.folder, tensor=name, remedy=why)
        return self._metas[name]

    def expect(
        self, name: str, shape: Sequence[int] | None, dtypes: Iterable[torch.dtype] = (), *, why: str = ""
    ) -> TensorMeta:
        """`meta(name)`, checked against a shape and the dtypes allowed (none given: any).

        The dtype comes first, since packing changes the shape as well.
        """
        meta = self.meta(name, why=why)
        allowed = tuple(dtypes)
        if allowed and meta.dtype not in allowed:
            expected = " or ".join(_dtype_name(d) for d in allowed)
            raise self.wrong(name, "has the wrong dtype", expected, _dtype_name(meta.dtype), why)
        if shape is not None and meta.shape != tuple(shape):
            raise self.wrong(name, "has the wrong shape", list(shape), list(meta.shape), why)
        return meta

    def wrong(
        self, name: str, problem: str, expected: object, found: object, remedy: str = ""
    ) -> CheckpointError:
        """The error for a tensor that is there but is not what it should be."""
        file = self._metas[name].file
        return CheckpointError(problem, file=file, tensor=name, expected=expected, found=found, remedy=remedy)

    def read(self, name: str, *, first: int = 0, count: int | None = None) -> Tensor:
        """The tensor, or entries first..first+count of its leading dimension, on the CPU.

        Raises CheckpointError for floats that are NaN or infinite, as `read_into` does.
        """
        meta = self.meta(name)
        shape = meta.shape if count is None else (count, *meta.shape[1:])
        out = torch.empty(shape, dtype=meta.dtype)
        self.read_into(name, out, first=first)
        return out

    def read_into(self, name: str, out: Tensor, *, first: int = 0) -> None:
        """Fill `out`, as many elements as it has, starting at entry `first` of the leading dimension.

        Bytes go straight to `out` if it is contiguous, on the CPU and of the stored dtype; otherwise
        through a temporary of at most `_CHUNK_BYTES`, or of one row where a row is larger.
        """
        meta = self.meta(name)
        offset = meta.offset + (first * (meta.nbytes // meta.shape[0]) if first else 0)
        if offset + out.numel() * meta.dtype.itemsize > meta.offset + meta.nbytes:
            raise ValueError(f"{name}: reading {list(out.shape)} from entry {first} leaves {meta.shape}")
        if out.device.type == "cpu" and out.is_contiguous() and out.dtype == meta.dtype:
            self._read_bytes(name, offset, out)
        elif out.numel():
            rows = out if out.ndim else out.reshape(1)
            step = max(1, _CHUNK_BYTES // (rows[0].numel() * meta.dtype.itemsize))
            for chunk in rows.split(step):
                temporary = torch.empty(chunk.shape, dtype=meta.dtype)
                self._read_bytes(name, offset, temporary)
                chunk.copy_(temporary)
                offset += temporary.nbytes
        self.set_aside([name])

    def read_staged(
        self, name: str, out: Tensor, staging: Tensor, *, first: int = 0, first_column: int = 0
    ) -> None:
        """Fill `out` [n, k], on any device, with rows from `first` and columns from `first_column` on.

        Rows come through `staging`, uint8 on the CPU, as many at a time as it holds. Where `out` is on a GPU,
        one that has as many columns as are stored and their dtype is filled from there in one copy each; of
        fewer columns, whole rows are copied to the GPU first.
        """
        meta = self.meta(name)
        rows, columns = meta.shape
        if first + out.shape[0] > rows or first_column + out.shape[1] > columns:
            raise ValueError(
                f"{name}: reading {list(out.shape)} from {first}, {first_column} on: {meta.shape}"
            )
        width, kept = columns * meta.dtype.itemsize, slice(first_column, first_column + out.shape[1])
        if staging.nbytes < width:
            staging = torch.empty(width, dtype=torch.uint8)
        step = staging.nbytes // max(1, width)
        for start in range(0, len(out), step):
            part = out[start : start + step]
            staged = staging[: len(part) * width].view(meta.dtype).view(len(part), columns)
            place = start * width, len(out) * width
            self._read_bytes(name, meta.offset + first * width + place[0], staged, *place)
            if staged.dtype != out.dtype:
                staged = staged.to(out.dtype)
            part.copy_(staged if out.shape[1] == columns else staged.to(out.device)[:, kept])
        self.set_aside([name])

    def _read_bytes(
        self, name: str, offset: int, out: Tensor, before: int = 0, total: int | None = None
    ) -> None:
        """before, total: bytes that were read for the same `out` of a caller, and all of these."""
        path = self._metas[name].file
        view = memoryview(bytearray()) if not out.numel() else out.reshape(-1).view(torch.uint8).numpy().data

        def read(first: int) -> None:
            for start in range(first, min(first + _PIECE_BYTES, len(view)), _CHECKED_BYTES):
                part = view[start : start + _CHECKED_BYTES]
                done = _fill(file, part, offset + start)
                if done < len(part):
                    raise CheckpointError(
                        "is truncated",
                        file=path,
                        tensor=name,
                        expected=f"{len(view) if total is None else total} bytes",
                        found=before + start + done,
                    )
                self._require_finite(name, offset + start, part)

        try:
            file = self._open(path)
            pieces = range(0, len(view), _PIECE_BYTES)
            if len(view) < _SHARED_BYTES:
                for first in pieces:
                    read(first)
            else:
                _share(read, pieces)
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", file=path, tensor=name) from None

    def _open(self, path: Path) -> int:
        """A descriptor, which has no position of its own to share."""
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[path]

    def _read_run(self, names: Sequence[str], out: Tensor, holds: Callable[[Tensor], bool] | None) -> bool:
        """Whether these tensors were read to the entries of `out` and hold what they may."""
        flat = out.reshape(-1)
        view, dtype = flat.view(torch.uint8).numpy().data, out.dtype
        each, width = len(view) // len(names), dtype.itemsize
        checked = dtype in _NOT_FINITE or holds is not None
        step = _CHECKED_BYTES if checked else each
        path, file, stored, begin, end = None, -1, None, 0, 0
        for name in names:
            meta = self._metas[name]
            if meta.stored != stored:
                if meta.dtype != dtype:
                    return False
                stored = meta.stored
            if meta.nbytes != each:
                return False
            if meta.file is not path:
                path, file = meta.file, self._open(meta.file)
            for start in range(0, each, step):
                size = min(step, each - start)
                if _fill(file, view[end : end + size], meta.offset + start) < size:
                    return False
                end += size
                if checked and (end - begin >= _CHECKED_BYTES or end == len(view)):
                    if self._first_not_finite(dtype, view[begin:end]) is not None:
                        return False
                    if holds is not None and not holds(flat[begin // width : end // width]):
                        return False
                    begin = end
        self.set_aside(names)
        return True

    def _require_finite(self, name: str, offset: int, part: memoryview) -> None:
        """part: whole elements of the tensor, from byte `offset` of its file on."""
        meta = self._metas[name]
        found = self._first_not_finite(meta.dtype, part)
        if found is None:
            return
        first = (offset - meta.offset) // meta.dtype.itemsize + found
        place = [int(i) for i in np.unravel_index(first, meta.shape)]
        raise self.wrong(
            name,
            "is damaged",
            "finite numbers",
            f"NaN or infinity at {place} of {list(meta.shape)}",
            "Download the checkpoint again, or write it again if its quantisation went wrong",
        )

    def _first_not_finite(self, dtype: torch.dtype, part: memoryview) -> int | None:
        """The first element that is NaN or infinite, of a part of less than 2 * _CHECKED_BYTES."""
        if dtype not in _NOT_FINITE:
            return None
        unsigned, smallest = _NOT_FINITE[dtype]
        bits = np.frombuffer(part, unsigned)
        if not hasattr(self._scratch, "memory"):  # fresh memory would take longer than the sums
            self._scratch.memory = np.empty(2 * _CHECKED_BYTES, np.uint8)
        doubled = np.add(bits, bits, out=self._scratch.memory[: len(part)].view(unsigned))
        return None if doubled.max() < smallest else int((doubled >= smallest).argmax())


def _share(call: Callable[[T], None], items: Sequence[T]) -> None:
    """`call` for each item, by several threads; raises what the first to fail in their order raised."""
    if getattr(_reader, "is_one", False):  # which would wait for others that may all wait like it
        for item in items:
            call(item)
        return
    running = [_readers().submit(call, item) for item in items]
    wait(running)  # for all of them: none reads on from a file that is closed
    for each in running:
        each.result()


_reader = threading.local()


def _become_reader() -> None:
    _reader.is_one = True


@cache
def _readers() -> ThreadPoolExecutor:
    """Of this process, and kept: a checkpoint has its threads share hundreds of reads."""
    count = min(_THREADS, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(count, thread_name_prefix="turnout-readers", initializer=_become_reader)


os.register_at_fork(after_in_child=_readers.cache_clear)  # where they do not run


def _fill(file: int, view: memoryview, offset: int) -> int:
    """Bytes read into `view` from `offset` of `file` on: fewer than it has only at the end of the file."""
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done:]], offset + done)
        if not got:
            break
        done += got
    return done


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
