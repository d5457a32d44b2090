"""A step as two micro-batches, one of which computes while the tokens of the other travel between ranks.

All ranks split alike, by what they synced on before the step: each brings the first half of its tokens to the
first micro-batch and the rest to the second, which may leave a rank without tokens in one or both. Where to
cut does not matter otherwise: the second half of a sequence finds the keys and values of the first in the
cache, for micro-batches attend in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnout.engine.scheduler.scheduler import Chunk

LEAST = 64  # tokens of the largest rank: below, weights read twice cost more than travelling does


def split_tokens(tokens: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """How many of the tokens of each data-parallel rank are in either half; None: the step is one batch."""
    if max(tokens) < LEAST:
        return None
    return tuple(-(-count // 2) for count in tokens), tuple(count // 2 for count in tokens)


def split_chunks(chunks: Sequence[Chunk], count: int) -> tuple[list[Chunk], list[Chunk]]:
    """The first `count` tokens of `chunks`, none of which has drafts, and the others."""
    first: list[Chunk] = []
    rest: list[Chunk] = []
    for chunk in chunks:
        middle = chunk.start + min(count, chunk.length)
        count -= middle - chunk.start
        if middle > chunk.start:
            first.append(chunk._replace(end=middle))
        if middle < chunk.end:
            rest.append(chunk._replace(start=middle))
    return first, rest
