"""Compressed attention on CUDA: single tokens of graphs by kernels (kernels/attention/compressed.py). Tokens
of chunks torch keeps, and makes entries of them (attention/compressed.py); the kernels choose and attend.

Legend: N tokens of a step, T of a chunk, L of the last tokens, E entries of its context, P pages of a row of
the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turnout.attention.compressed import CompressedAttention, Part
from turnout.attention.entries import Compressible, Compressor
from turnout.attention.interface import Attention
from turnout.attention.kinds import CompressedSpec

ROWS = 512  # tokens of a chunk that are computed at a time
SCORES = 2**25  # the most scores of these, but for a single token's


class TritonCompressed(CompressedAttention):
    """Compressed attention, whose tokens in graphs, and in chunks, kernels compute."""

    def rows(
        self, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor, states_N: Tensor | None = None
    ) -> Attention:
        assert states_N is not None, "compressed attention keeps states"
        return CompressedRows(self, table_NP, ends_N, states_N)

    def attend_part(
        self,
        part: Part,
        layer: int,
        q_THD: Tensor,
        kv_TD: Tensor,
        sinks_H: Tensor,
        rest: Compressible | None,
    ) -> Tensor:
        from turnout.kernels.attention.compressed import attend

        spec, E, parts = self.spec, len(part.slots_E), []
        recent_LD, cache = self.keep_part(part, layer, kv_TD, rest), self.layer_cache(layer)
        ends_T = torch.arange(part.start + 1, part.end + 1, device=self.device)
        most = max(1, min(ROWS, SCORES // max(1, E)) & -2)  # even, so that parts begin at 16 bytes
        for at in range(0, len(q_THD), most):
            rows = slice(at, min(at + most, len(q_THD)))
            ends_N, step = ends_T[rows], slice(part.rows.start + at, part.rows.start + rows.stop)
            counts_N = ends_N // spec.rate if E else torch.zeros_like(ends_N)
            table_NE, longest = part.slots_E.expand(len(ends_N), E), E
            if rest is not None and rest.index_queries is not None and spec.index_topk < E:
                table_NE, counts_N = choose(spec, rest, step, cache, table_NE, counts_N, 1)
                longest = spec.index_topk
            parts.append(
                attend(
                    q_THD[rows].contiguous(),
                    recent_LD,
                    ends_N,
                    None,
                    cache,
                    table_NE,
                    counts_N,
                    sinks_H,
                    seen=spec.recent,
                    page=1,
                    longest=longest,
                    scale=spec.scale,
                    processors=self.processors,
                    first=part.end - len(recent_LD),
                )
            )
        return torch.cat(parts) if parts else q_THD


def choose(
    spec: CompressedSpec,
    rest: Compressible,
    rows: slice,
    cache: Tensor,
    table_NP: Tensor,
    counts_N: Tensor,
    page: int,
) -> tuple[Tensor, Tensor]:
    """(int32 [N, K]: entries that tokens of the step see; int32 [N]: how many), of the first counts [N]."""
    from turnout.kernels.attention.index import chosen, scores

    assert rest.index_queries is not None
    assert rest.index_weights is not None
    scores_NE = scores(
        rest.index_queries[rows].contiguous(),
        rest.index_weights[rows].contiguous(),
        cache[:, spec.head_dim :],
        table_NP,
        counts_N,
        page_size=page,
    )
    return chosen(scores_NE, table_NP, counts_N, spec.index_topk, page_size=page)


class CompressedRows(Attention):
    """Of one token per row, whose pages, lengths and states are read on the device.

    The table of entries has a column for each page of them: where a window is longer than a page of tokens,
    that of its last token.
    """

    def __init__(self, paged: TritonCompressed, table_NP: Tensor, ends_N: Tensor, states_N: Tensor):
        self._paged, self._states_N = paged, states_N.contiguous()
        self._ends_N = ends_N.contiguous()
        rate = paged.spec.rate
        step = max(1, rate // paged.page_size)
        self._table_NP = table_NP[:, step - 1 :: step].contiguous()
        self._per_page = max(1, paged.spec.entries_per_page(paged.page_size))
        # Of entries that tokens see, and of the positions where the windows that they end begin.
        self._counts_N = self._ends_N // rate if rate else torch.zeros_like(self._ends_N)
        self._begins_N = (self._ends_N - rate).clamp(min=0)
        self._angles: tuple[Tensor, Tensor] | None = None

    def compressed(
        self, layer: int, q_NHD: Tensor, kv_ND: Tensor, sinks_H: Tensor, rest: Compressible | None
    ) -> Tensor:
        from turnout.kernels.attention.compressed import attend, keep

        paged, spec = self._paged, self._paged.spec
        recent, open, cache = paged.layer_state(layer)
        keep(kv_ND, None if rest is None else rest.raw_NX, self._ends_N, self._states_N, recent, open)
        table_NP, counts_N, page = self._table_NP, self._counts_N, self._per_page
        longest = table_NP.shape[1] * page if spec.rate else 0
        if rest is not None:
            self._make(rest, open, cache)
            if rest.index_queries is not None and longest > spec.index_topk:
                table_NP, counts_N = choose(spec, rest, slice(None), cache, table_NP, counts_N, page)
                longest, page = spec.index_topk, 1
        return attend(
            q_NHD.contiguous(),
            recent,
            self._ends_N,
            self._states_N,
            cache,
            table_NP,
            counts_N,
            sinks_H,
            seen=spec.recent,
            page=page,
            longest=longest,
            scale=spec.scale,
            processors=paged.processors,
        )

    def _make(self, rest: Compressible, open: Tensor, cache: Tensor) -> None:
        """The entries of windows that end with a token of this step."""
        at = to = 0
        for maker in (rest.entries, rest.index_entries):
            if maker is not None:
                self._make_kind(maker, open, cache, at, to)
                at, to = at + 2 * maker.bias_RX.shape[-1], to + len(maker.norm.weight)

    def _make_kind(self, maker: Compressor, open: Tensor, cache: Tensor, at: int, to: int) -> None:
        from turnout.kernels.attention.compressed import make_entries

        if self._angles is None:  # alike in all layers of a group
            self._angles = maker.turn.cos_sin(self._begins_N)
        make_entries(
            open,
            self._ends_N,
            self._states_N,
            self._table_NP,
            cache,
            maker.bias_RX,
            maker.norm.weight,
            *self._angles,
            series=maker.spec.series,
            page=self._per_page,
            at=at,
            to=to,
            eps=maker.norm.eps,
        )
