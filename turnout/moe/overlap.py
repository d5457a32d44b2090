"""Work beside other work: a second CUDA stream that forks off the current one and joins it again.

What is forked may read what is there already, and nothing that the caller makes until it joins. Joining
orders all that the two streams do later, so memory needs no further care: the caching allocator gives a
block back to the stream that it belongs to, and each stream waits for the other before it goes on. A CUDA
graph captures fork and join as branches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


@cache
def _second(device: torch.device) -> torch.cuda.Stream:
    """One for all layers: memory belongs to streams, and each would keep its own."""
    return torch.cuda.Stream(device)


def beside(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """Start `function(x)` on the second stream of the device; what is returned joins and gives its result."""
    ours, second = torch.cuda.current_stream(x.device), _second(x.device)
    second.wait_stream(ours)
    with torch.cuda.stream(second):
        result = function(x)

    def join() -> Tensor:
        ours.wait_stream(second)
        return result

    return join


def later(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """`function(x)` when asked for."""
    return lambda: function(x)
