"""Work beside other work: CUDA streams that fork off the current one and join it again.

What is forked may use what is there already, and nothing that the caller makes until it joins. A CUDA graph
captures forks and joins as branches.

The caching allocator gives a block back to the stream that allocated it, whose later work may overwrite it at
once. A fork waits for all that its caller has queued, so what it leaves behind needs no care; but what the
caller gives to a fork, the caller must keep until it has joined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
Fork = Callable[[Callable[[], T]], Callable[[], T]]


@cache
def _stream(device: torch.device, name: str) -> torch.cuda.Stream:
    """One of a name for all layers: memory belongs to streams, and each would keep its own."""
    return torch.cuda.Stream(device)


def fork(device: torch.device, name: str, work: Callable[[], T]) -> Callable[[], T]:
    """Start `work` on the stream called `name`; what is returned joins, and gives its result."""
    ours, other = torch.cuda.current_stream(device), _stream(device, name)
    other.wait_stream(ours)
    with torch.cuda.stream(other):
        result = work()
        done = other.record_event()

    def join() -> T:
        ours.wait_event(done)  # and for nothing that was forked after it
        return result

    return join


def at_once(work: Callable[[], T]) -> Callable[[], T]:
    """`work` where it stands, on the current stream."""
    result = work()
    return lambda: result
