"""The server's own memory: what a burst of large requests took goes back to the system."""

from __future__ import annotations

import ctypes
import resource

MAP_BYTES = 128 * 1024
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def map_large_blocks() -> None:
    """Have blocks of MAP_BYTES and more mapped by themselves, and unmapped when they are freed.

    glibc begins like that, but after the first free of a large block takes its size for the new threshold;
    from then on request bodies leave holes in the heap. Other allocators have no such call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, MAP_BYTES)


def release_freed_memory() -> None:
    """Hand the pages of freed small blocks back to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def allow_many_connections() -> None:
    """Raise the soft limit of open files, often 1024, to the hard one: each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
