"""Compiles kernels when their module is imported, and keeps what came out for the next process.

numba keeps compiled functions by the file that they stand in, and would take no notice of a change in another
file that they call into. So they are kept in a folder named by a digest of all files here: next to the
sources, as Python's own compiled files are, or in the cache folder (turnout/cache.py) where that cannot be
written, which then starts with what was compiled next to the sources. A tree may be compiled in one place and
moved to another, as images of containers are.

Parts of kernels that processes compiled apart are linked by name, which numba makes of a function's qualified
name and a number that counts up from 1 in each process. So two functions with one qualified name, made by one
`def`, get mixed up once a process compiles one kernel and fetches another: each is given a name of its own.

Measured on one core of an AMD EPYC: numba itself takes 0.6 s to import, a kernel 0.3 to 2 s to compile and
10 ms to fetch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from turnout import cache

HERE = Path(__file__).parent


def _name() -> str:
    digest = hashlib.sha1(numba.__version__.encode())
    for file in sorted(HERE.glob("*.py")):
        digest.update(file.read_bytes())
    return f"kernels-{digest.hexdigest()[:12]}"


def _folder(name: str) -> Path | None:
    """Where kernels are fetched from and, if it can be written, kept; None if there is no such place."""
    own = HERE / "__pycache__" / name
    if os.access(next(place for place in (own, *own.parents) if place.exists()), os.W_OK):
        return own
    kept = cache.writable_folder()
    if kept is None:
        return own if own.is_dir() else None
    if own.is_dir() and not (kept / name).exists():
        _copy(own, kept / name)
        return kept / name if (kept / name).exists() else own
    return kept / name


def _copy(source: Path, target: Path) -> None:
    """Whole or not at all; other ranks may do the same."""
    draft = target.with_suffix(f".{os.getpid()}")
    try:
        shutil.copytree(source, draft, copy_function=shutil.copyfile)
        draft.chmod(0o700)
        draft.rename(target)
    except OSError:  # another one was first, or there is no room
        shutil.rmtree(draft, ignore_errors=True)


FOLDER = _folder(_name())


class Locator:
    """Tells numba where a kernel is kept; see NUMBA_CACHE_LOCATOR_CLASSES in its documentation.

    numba's own put the path of the sources into the name of the folder, and refuse one that is not writable.
    """

    def __init__(self, function: Callable[..., Any]):
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> Locator:
        return cls(function)

    def get_cache_path(self) -> str:
        return str(FOLDER)

    def ensure_cache_path(self) -> None:
        assert FOLDER is not None
        FOLDER.mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> str:
        return FOLDER.name if FOLDER else ""  # holds the digest of all sources

    def get_disambiguator(self) -> str:
        return str(self._line)


def kernel(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """The decorated function, compiled for `signature`; it runs without Python's global lock."""
    return _kept(lambda keep: numba.njit(signature, nogil=True, cache=keep, error_model="numpy"))


def function_at_address(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """The decorated function, compiled for `signature`, as C would call it: by its `address`."""
    return _kept(lambda keep: numba.cfunc(signature, nopython=True, cache=keep, error_model="numpy"))


def _kept(compiler: Callable[[bool], Callable[..., Any]]) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles, and keeps what came out where there is a place.

    compiler: the decorator of numba's, given whether to keep it.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        if FOLDER is not None:
            before = numba.config.CACHE_LOCATOR_CLASSES
            numba.config.CACHE_LOCATOR_CLASSES = f"{Locator.__module__}.{Locator.__qualname__}"
            try:
                return compiler(True)(function)
            except OSError:  # the folder is full, or holds kernels of another CPU and cannot be written
                pass
            finally:
                numba.config.CACHE_LOCATOR_CLASSES = before
        return compiler(False)(function)

    return compiled


part = numba.njit(error_model="numpy")  # a function that kernels call
inline = numba.njit(forceinline=True, error_model="numpy")  # part of whatever kernel calls it
