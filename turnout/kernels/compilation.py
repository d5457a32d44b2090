"""Compiling many kernels ahead, in processes: tuning asks for hundreds, and each takes a second of one core.

What is to be compiled is recorded by calling for it: Triton's hook sees every kernel that is not compiled
yet, with all that specialises it, and keeps it from being compiled, and launched, there and then. Processes
compile the records into Triton's cache on disk, where the next real call finds them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from triton import knobs
from triton.errors import TritonError

FAILURES = (TritonError,)  # of a kernel that cannot be compiled or needs too much of the GPU


@dataclass(frozen=True, kw_only=True)
class Record:
    """A kernel to compile, as Triton's `JITFunction.preload` takes it."""

    module: str
    name: str
    specialization: str


@contextmanager
def recording() -> Iterator[dict[Record, None]]:
    """Calls of kernels that are not compiled yet do nothing but leave a record here."""
    records: dict[Record, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        records[Record(module=fn.module, name=fn.name, specialization=compile["specialization_data"])] = None
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield records
    finally:
        knobs.runtime.jit_cache_hook = before


def compile_all(records: Sequence[Record], processes: int, progress: Callable[[int, int], None]) -> None:
    """Into the cache on disk. What fails is left to fail, with its reason, where it is called."""
    if not records or processes < 2:
        return
    with ProcessPoolExecutor(min(processes, len(records)), mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(_compile, record) for record in records]
        for done, _ in enumerate(as_completed(jobs)):
            progress(done + 1, len(records))


def _compile(record: Record) -> None:
    getattr(importlib.import_module(record.module), record.name).preload(record.specialization)
