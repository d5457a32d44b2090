"""A step as two micro-batches: one computes while the tokens of the other are exchanged between ranks.

All ranks split alike, by what they exchanged before the step: each brings the first half of its tokens to the
first micro-batch and the rest to the second, which may leave a rank without tokens in one or both. A cut may
pass through a sequence: its second part finds the keys and values of the first in the cache, because
micro-batches attend in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from turnout.engine.scheduler.scheduler import Chunk
from turnout.models.interface import Step

W = TypeVar("W")

LEAST = 64  # tokens of the largest rank: below, weights read twice cost more than the exchange


def split(
    tokens: tuple[int, ...],
    dp_rank: int,
    whole: W,
    *,
    cut: Callable[[W, int], tuple[W, W]],
    make: Callable[[W, tuple[int, ...], Step | None], Step],
) -> Step:
    """One step as two micro-batches, or as one where it has too few tokens.

    tokens: how many each data-parallel rank brings; all ranks pass the same and so split alike.
    whole: this rank's part of the step; `cut(whole, count)` divides it after `count` tokens.
    make(part, tokens, second): the `Step` of a part, given the tokens of each rank in it.
    """
    both = split_tokens(tokens)
    if both is None:
        return make(whole, tokens, None)
    first, second = cut(whole, both[0][dp_rank])
    return make(first, both[0], make(second, both[1], None))


def split_tokens(tokens: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """How many of the tokens of each data-parallel rank are in either micro-batch; None: do not split."""
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
