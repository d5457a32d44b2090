"""What `MoELayer` needs so that work may overlap: forked streams, a batch in stages, a batch in chunks.

Two-batch overlap. While the tokens of one micro-batch are on their way between ranks, on a stream of their
own, the other micro-batch computes:

    compute   attention A | attention B | experts A  | experts B | attention A ...
    exchange              | dispatch A  | dispatch B | combine A | combine B

So whoever has two micro-batches (models/decoder.py) begins both before it computes either. Exchanges follow
each other in the same order on every rank, and so do computations, which may therefore share one workspace.

Chunks. Where buffers hold fewer tokens than ranks bring to a step, the step passes the layer in chunks, one
after another; every rank makes the same number of them, with tokens in each or not. Attention has seen the
whole step, so a token gets what it would have got in one pass.

Legend: T tokens of this rank, H hidden, k top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from turnout.moe.interface import Dispatcher, Experts
from turnout.parallel.groups import shares

R = TypeVar("R")
Fork = Callable[[Callable[[], R]], Callable[[], R]]
Chunk = tuple[Tensor, Tensor, Tensor, Sequence[int]]  # the arguments of `Dispatcher.dispatch`


class InFlight(Protocol):
    """A micro-batch that a layer has begun. Both are called once, in this order."""

    def compute(self) -> None: ...

    def result(self) -> Tensor:
        """[T, H] of this rank's tokens."""
        ...


class Finished:
    """A micro-batch of a layer that exchanges nothing, and is computed when it begins."""

    def __init__(self, out_TH: Tensor) -> None:
        self._out_TH = out_TH

    def compute(self) -> None: ...

    def result(self) -> Tensor:
        return self._out_TH


class StagedBatch:
    """Dispatch, experts and combine of one micro-batch; dispatch and combine run on a forked stream.

    finish: makes the layer's output [T, H] of what combine gave for each chunk.
    """

    def __init__(
        self,
        experts: Experts,
        dispatcher: Dispatcher,
        chunks: Sequence[Chunk],
        finish: Callable[[list[Tensor]], Tensor],
        device: torch.device,
    ) -> None:
        """Starts the dispatch of the first chunk."""
        self._experts, self._dispatcher, self._finish = experts, dispatcher, finish
        self._exchange: Fork = fork_on(device, "exchange")
        self._combined: list[Callable[[], Tensor]] = []
        self._computed: tuple[Any, ...] = ()
        self._chunks = chunks  # kept until joined: the other stream reads them
        self._dispatched = self._exchange(partial(dispatcher.dispatch, *chunks[0]))

    def compute(self) -> None:
        """Run the experts on each chunk as it arrives, and start its combine."""
        self._compute(self._dispatched)
        for chunk in self._chunks[1:]:
            self._compute(self._exchange(partial(self._dispatcher.dispatch, *chunk)))

    def _compute(self, dispatched: Callable[[], tuple[Any, Any]]) -> None:
        batch, state = dispatched()  # joins the exchange, so the combine of the chunk before is done too
        out = self._experts(batch)
        self._computed = (batch, state, out)  # kept until the next join: the other stream reads them
        self._combined.append(self._exchange(lambda: self._dispatcher.combine(out, state)))

    def result(self) -> Tensor:
        """[T, H] of this rank's tokens."""
        out_TH = self._finish([join() for join in self._combined])
        self._chunks, self._computed = (), ()
        return out_TH


def in_chunks(
    x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, tokens: Sequence[int], dp_rank: int, most: int
) -> list[Chunk]:
    """The batch of data-parallel rank `dp_rank` in the fewest, equal chunks in which no rank has more than
    `most` tokens (0: any number). tokens: how many each rank brings."""
    count = max(1, -(-max(tokens) // most)) if most else 1
    if count == 1:
        return [(x_TH, ids_TK, weights_TK, tokens)]
    chunks_CR = list(zip(*(shares(own, count) for own in tokens), strict=True))
    own = [chunk_R[dp_rank] for chunk_R in chunks_CR]
    parts = zip(x_TH.split(own), ids_TK.split(own), weights_TK.split(own), chunks_CR, strict=True)
    return list(parts)


def fork_on(device: torch.device, name: str) -> Fork:
    """Forks to the stream called `name`; on a CPU, work runs where it stands."""
    return partial(_fork, device, name) if device.type == "cuda" else at_once


def at_once(work: Callable[[], R]) -> Callable[[], R]:
    """`work` on the current stream; what is returned gives its result."""
    result = work()
    return lambda: result


def _fork(device: torch.device, name: str, work: Callable[[], R]) -> Callable[[], R]:
    """Start `work` on the stream called `name`; what is returned joins it and gives its result.

    `work` may use what exists already, and nothing that the caller makes before it joins. A CUDA graph
    captures forks and joins as branches.

    The caching allocator gives a block back to the stream that allocated it, whose later work may overwrite
    it at once. A fork waits for all that its caller has queued, so what it allocates is safe; but what the
    caller hands to a fork, the caller must keep until it has joined.
    """
    ours, other = torch.cuda.current_stream(device), _stream(device, name)
    other.wait_stream(ours)
    with torch.cuda.stream(other):
        result = work()
        done = other.record_event()

    def join() -> R:
        ours.wait_event(done)  # and for nothing that was forked after it
        return result

    return join


@cache
def _stream(device: torch.device, name: str) -> torch.cuda.Stream:
    """One of a name for all layers: memory belongs to streams, and each would keep its own."""
    return torch.cuda.Stream(device)
