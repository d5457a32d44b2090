"""The entries that compressed attention makes of whole windows of tokens, and which of them a token sees.

Legend: N tokens of a step, R of some of them, D head size, Hi/Di number and size of index heads, Y = D + Di
channels of an entry, X of what is kept of a token until its entries are made, P tokens of windows, E entries
of a context, M entries that are made, W windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from turnout.attention.indexing import Index, index_scores, largest
from turnout.attention.kinds import CompressedSpec


class Turn(Protocol):
    """Rotates the ends of entries."""

    def __call__(self, x_MD: Tensor, positions_M: Tensor, /) -> Tensor:
        """[M, D] of [M, D] and int64 [M]."""
        ...

    def cos_sin(self, positions_M: Tensor, /) -> tuple[Tensor, Tensor]:
        """cos and sin [M, R] by which it does, of halves; sin with the sign of each half."""
        ...


class RowNorm(Protocol):
    """An RMS norm of rows."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """What makes entries of one kind. bias: [rate, series * D], added to gates; norm: of rows [D]."""

    spec: CompressedSpec
    bias_RX: Tensor
    norm: RowNorm
    turn: Turn

    def __call__(self, content_PX: Tensor, gate_PX: Tensor, first: int, count: int) -> Tensor:
        """[count, D]: entries first, first + 1, ... of the tokens of their windows, and with overlap of the
        window before them unless they begin with window 0."""
        rate, before = self.spec.rate, int(self.spec.overlap and first > 0)
        content, gate = (x.unflatten(0, (count + before, rate)) for x in (content_PX, gate_PX))
        gate = gate.float() + self.bias_RX.float()
        if self.spec.overlap:
            content, gate = (_overlapped(x, before, fill) for x, fill in ((content, 0.0), (gate, -torch.inf)))
        made_MD = (content * gate.softmax(dim=1).to(content.dtype)).sum(dim=1)
        places_M = torch.arange(first, first + count, device=made_MD.device)
        return self.turn(self.norm(made_MD), places_M * rate)


def _overlapped(x_WRX: Tensor, before: int, fill: float) -> Tensor:
    """[M, 2 rate, D]: the first series of the window before (`fill` before window 0), then the second."""
    earlier_WRD, own_WRD = x_WRX.chunk(2, dim=-1)
    if before:
        return torch.cat((earlier_WRD[:-1], own_WRD[1:]), dim=1)
    none_1RD = torch.full_like(earlier_WRD[:1], fill)
    return torch.cat((torch.cat((none_1RD, earlier_WRD[:-1])), own_WRD), dim=1)


@dataclass(frozen=True, kw_only=True)
class Compressible:
    """Of the tokens of a step: content and gate of entries [N, 2 series D], then of the index's [N, 2 series
    Di]. index_queries: [N, Hi, Di], rotated; index_weights: float32 [N, Hi]. The last three are None where
    there is no index."""

    raw_NX: Tensor
    entries: Compressor
    index_entries: Compressor | None = None
    index_queries: Tensor | None = None
    index_weights: Tensor | None = None

    def made(self, raw_PX: Tensor, first: int, count: int) -> Tensor:
        """Entries [count, D + Di], of what is kept of tokens [P, X]."""
        parts, at = [], 0
        for make in (self.entries, self.index_entries):
            if make is not None:
                size = make.bias_RX.shape[-1]
                content_PX, gate_PX = raw_PX[:, at : at + 2 * size].chunk(2, dim=-1)
                parts.append(make(content_PX, gate_PX, first, count))
                at += 2 * size
        return torch.cat(parts, dim=-1)

    def choose(self, rows: slice | Tensor, entries_EY: Tensor, seen_RE: Tensor) -> Tensor:
        """bool [R, E]: which of the entries that these tokens may see they do see. entries: [E, Y] of one
        context, or [R, E, Y] of each token's."""
        topk = self.entries.spec.index_topk
        if self.index_queries is None or self.index_weights is None or entries_EY.shape[-2] <= topk:
            return seen_RE
        keys_ED = entries_EY[..., self.entries.spec.head_dim :]
        index = Index(self.index_queries[rows], keys_ED[:0], self.index_weights[rows])
        return largest(index_scores(index, keys_ED), seen_RE, topk)
