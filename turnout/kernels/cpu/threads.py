"""Runs a kernel on as many threads as torch would use, each taking the next piece of work that is left.

Threads of Python's, for kernels hold no global lock: a pool of numba's or OpenMP's would be a second one
next to torch's, and they get in each other's way. Whoever is slow, since another process took its core, takes
fewer pieces, where pieces dealt out beforehand would make all wait for it.

A call with one thread is a plain call; a second thread costs 20 to 50 us, so that callers say from where on
it pays. A kernel of several phases (phases.py) is one call, and waits for no thread that has nothing to do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

_Counters = ctypes.c_int64 * 2
_Phases = ctypes.c_int64 * 64  # of up to 8 phases
WORTH_SHARING = 1e6  # multiplications, about 50 us


@cache
def _pool(helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(helpers, thread_name_prefix="turnout-kernels")


def threads_for(multiplications: float) -> int:
    """How many threads work of this size is worth."""
    return torch.get_num_threads() if multiplications > WORTH_SHARING else 1


def parallel(kernel: Callable[..., Any], threads: int, *args: Any) -> None:
    """Call `kernel` on `threads` threads with the address of two counters, from which they take pieces of
    work and their own number, and `args`."""
    counters = _Counters()  # a tensor would take 15 times as long to make, for each of a step's many calls
    address = ctypes.addressof(counters)
    if threads == 1:
        kernel(address, *args)
        return
    helpers = [_pool(threads - 1).submit(kernel, address, *args) for _ in range(threads - 1)]
    kernel(address, *args)
    for helper in helpers:
        helper.result()


def in_phases(kernel: Callable[..., Any], threads: int, owner: object, *args: Any) -> None:
    """Call `kernel` on `threads` threads with the address of its phases (phases.py), how many threads there
    are, and `args`. A thread that comes late finds nothing to do, so none is waited for; it keeps `owner`, of
    what the kernel reads outside of its phases."""
    phases = _Phases()
    for _ in range(threads - 1):
        _pool(threads - 1).submit(_help, kernel, owner, phases, threads, *args)
    kernel(ctypes.addressof(phases), threads, *args)


def _help(
    kernel: Callable[..., Any], owner: object, phases: ctypes.Array[ctypes.c_int64], *args: Any
) -> None:
    kernel(ctypes.addressof(phases), *args)
