"""Has glibc give freed memory back to the system; other allocators have no such calls."""

from __future__ import annotations

import ctypes

MAP_BYTES = 128 * 1024
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def map_large_blocks() -> None:
    """Have blocks of MAP_BYTES and more mapped by themselves, and unmapped when they are freed.

    glibc begins like that, but after the first free of a large block takes its size for the new threshold;
    from then on request bodies leave holes in the heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, MAP_BYTES)


def release_freed_memory() -> None:
    """Hand the pages of freed blocks back to the system.

    glibc keeps holes between live blocks below 32 MB: after loading a small model layer by layer they amount
    to a third of its weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
