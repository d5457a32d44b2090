"""A step that passes an MoE layer in chunks, where buffers hold fewer tokens than ranks bring to it.

All ranks make as many of them, one after another, whether they have tokens in each or not. Attention has seen
the step whole, so a token gets what it would have got in one pass.

Legend: T tokens of this rank, R data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from turnout.parallel.groups import shares

Given = tuple[Tensor, Tensor, Tensor, Sequence[int]]  # as a dispatcher takes it


def cut(
    x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, tokens: Sequence[int], rank: int, most: int
) -> list[Given]:
    """The batch of data-parallel rank `rank` in as few chunks as keep every rank's part of one to `most`
    tokens (0: any number), as even as can be. tokens: how many each rank brings."""
    count = max(1, -(-max(tokens) // most)) if most else 1
    if count == 1:
        return [(x_TH, ids_TK, weights_TK, tokens)]
    chunks_CR = list(zip(*(shares(own, count) for own in tokens), strict=True))
    own = [chunk_R[rank] for chunk_R in chunks_CR]
    parts = zip(x_TH.split(own), ids_TK.split(own), weights_TK.split(own), chunks_CR, strict=True)
    return list(parts)
