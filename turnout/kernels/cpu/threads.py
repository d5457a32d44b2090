"""How many threads compute together in kernels, each taking the next piece of work that is left.

Threads of Python's, for kernels hold no global lock: a pool of numba's or OpenMP's would be a second one
next to torch's, and they get in each other's way. Whoever is slow, since another process took its core, takes
fewer pieces, where pieces dealt out beforehand would make all wait for it.

Kernels of phases (phases.py) have threads that stay with a step (team.py), and do not wait for any that has
begun no piece. So they take every core, where torch's own threads wait for each other at each of its
operations (engine/threads.py). `parallel` waits for all of its threads, each of which costs 20 to 50 us
more, and has as many as torch. A call with one thread is a plain call, so that callers say from where on
more pay.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

_Counters = ctypes.c_int64 * 2
WORTH_SHARING = 1e6  # multiplications, about 50 us
_together = 0  # threads of kernels of phases; 0: as many as torch's


@cache
def _pool(helpers: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(helpers, thread_name_prefix="turnout-kernels")


def use_threads(count: int) -> None:
    """Have `count` threads compute together in kernels of phases."""
    global _together
    _together = count


def threads_for(multiplications: float) -> int:
    """How many threads work of this size is worth, in a kernel of phases."""
    return (_together or torch.get_num_threads()) if multiplications > WORTH_SHARING else 1


def threads_that_wait(multiplications: float) -> int:
    """The same of `parallel`."""
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
