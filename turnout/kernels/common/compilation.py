"""Compiling many kernels ahead, in processes: tuning asks for hundreds, and each takes a second of one core.

What is to be compiled is recorded by calling for it: Triton's hook sees every kernel that is not compiled
yet, with all that specialises it, and keeps it from being compiled there and then. Processes compile the
records into Triton's cache on disk, where the next real call finds them. Meanwhile nothing is launched, not
even what is compiled: a GEMM would follow a table of tiles that no sort has written.

This is the only file that patches Triton: `JITFunction.run`, the hook `jit_cache_hook` and `dtype.is_dtype`
are its internals, and may change with any minor version. With a Triton other than PATCHED nothing is
recorded, so that kernels are compiled one by one as they are called.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from triton import __version__, knobs
from triton.errors import TritonError
from triton.language import dtype
from triton.runtime.jit import JITFunction

PATCHED = SpecifierSet(">=3.6,<3.7")  # versions of Triton whose internals are known
MOST_PROCESSES = 16
FAILURES = (TritonError,)  # of a kernel that cannot be compiled or needs too much of the GPU


@dataclass(frozen=True, kw_only=True)
class Record:
    """A kernel to compile, as Triton's `JITFunction.preload` takes it."""

    module: str
    name: str
    specialization: str


def can_record() -> bool:
    """Whether the internals of the Triton installed here are known."""
    return PATCHED.contains(Version(__version__).base_version)


@contextmanager
def recording() -> Iterator[dict[Record, None]]:
    """Calls of kernels launch nothing; those of kernels that are not compiled yet leave a record here."""
    records: dict[Record, None] = {}
    run = JITFunction.run

    def prepare(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        records[Record(module=fn.module, name=fn.name, specialization=compile["specialization_data"])] = None
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        with patch.object(JITFunction, "run", prepare):
            yield records
    finally:
        knobs.runtime.jit_cache_hook = before


def compilers() -> Executor:
    """A process per core, up to MOST_PROCESSES."""
    return ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1), mp_context=get_context("spawn"))


def submit(pool: Executor, records: Iterable[Record]) -> list[Future[None]]:
    """Compile into the cache on disk. What fails is left to fail, with its reason, where it is called."""
    return [pool.submit(_compile, record) for record in records]


def _compile(record: Record) -> None:
    # `preload` takes a string that names a type, such as the format "bf16", for the type, and files what it
    # compiles where the string's would be. Our kernels have strings among their constants, and no types.
    with patch.object(dtype, "is_dtype", lambda name: False):
        getattr(importlib.import_module(record.module), record.name).preload(record.specialization)
