"""Attention on CUDA by kernels over the paged cache (kernels/attention/decode.py, prefill.py, on Hopper
prefill_specialised.py).

Legend: N tokens of a step, M of them decoding, B chunks, P pages of the widest context, F fields of a tile,
Hq/Hkv query/KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from turnout.attention.backends.triton.declaration import specialises_prompts
from turnout.attention.interface import Attention, Chunk
from turnout.attention.paged import PagedAttention, place_of, to_device
from turnout.attention.rows import RowAttention, StoredAttention, cut_of
from turnout.registry import ATTENTION_BACKENDS, load


class TritonAttention(PagedAttention):
    """Keys and values in pages, by one kernel for decoding tokens and one for chunks."""

    @cached_property
    def specialises(self) -> bool:
        """Whether chunks are attended to by prefill_specialised.py; not under --deterministic."""
        from turnout.kernels.common.devices import on_hopper

        dtype = place_of(self.device, self.dtype, self.page_size).dtype
        return not self.fixed_spans and on_hopper(self.cache) and specialises_prompts(self.spec, dtype)

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        return StepAttention(self, decoding, chunks)

    def spans(self, rows: int, context: int) -> int:
        return cut_of(self, rows, context).splits

    def rows(
        self, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor, states_N: Tensor | None = None
    ) -> Attention:
        return RowAttention(self, slots_N, table_NP, ends_N)


class StepAttention(StoredAttention):
    """Of a step: tokens of sequences that decode, then chunks of others."""

    def __init__(self, paged: TritonAttention, decoding: Sequence[Chunk], chunks: Sequence[Chunk]):
        from turnout.kernels.attention import prefill, prefill_specialised

        places_N, slots_N, table_BP, owners_N = paged.place_rows([*decoding, *chunks])
        self._num_decoding = at = sum(chunk.length for chunk in decoding)
        self._prompts = None
        if paged.chosen and paged.chosen.takes_prompts([chunk.length for chunk in chunks]):
            backend = ATTENTION_BACKENDS.get(paged.chosen.prompts)
            make = load(backend.implementations[paged.spec.kind])
            self._prompts = make(paged, chunks, table_BP[len(decoding) :])
            chunks = ()
        extents = []
        for owner, chunk in enumerate(chunks, len(decoding)):
            extents.append((at, chunk.start, chunk.end, owner))
            at += chunk.length
        queries = prefill_specialised.QUERIES if paged.specialises else prefill.QUERIES
        tiles_TF = prefill.tiles(extents, prefill.tile_tokens(paged.group, queries))
        self.places_N, slots_N, self._table_BP, owners_N, self._tiles_TF = to_device(
            [places_N, slots_N, table_BP, owners_N, tiles_TF], paged.device
        )
        super().__init__(paged, slots_N)
        self._specialises = paged.specialises
        if M := self._num_decoding:
            self._ends_M = self.places_N[:M] + 1
            self._table_MP = self._table_BP[owners_N[:M]]
            self._cut = cut_of(paged, M)

    def attend(
        self, layer: int, q_NHD: Tensor, sinks_H: Tensor | None = None, out_NHD: Tensor | None = None
    ) -> Tensor:
        from turnout.kernels.attention import decode, prefill, prefill_specialised

        spec, cache_HS2D = self._paged.spec, self._paged.layer_cache(layer)
        page_size, scale, window = self._paged.page_size, spec.scale, spec.window
        q_NHD = q_NHD.contiguous()
        out_NHD = torch.empty_like(q_NHD) if out_NHD is None else out_NHD
        if M := self._num_decoding:
            decode.attend(
                q_NHD[:M],
                cache_HS2D,
                self._table_MP,
                self._ends_M,
                page_size=page_size,
                cut=self._cut,
                scale=scale,
                window=window,
                sinks_H=sinks_H,
                out_BHD=out_NHD[:M],
            )
        if self._prompts is not None:
            self._prompts.attend(layer, q_NHD[M:], out_NHD[M:], sinks_H)
            return out_NHD
        given = q_NHD, cache_HS2D, self._tiles_TF, self._table_BP, out_NHD
        if self._specialises:
            processors = self._paged.processors
            prefill_specialised.attend(*given, page_size=page_size, scale=scale, processors=processors)
        else:
            prefill.attend(*given, page_size=page_size, scale=scale, window=window, sinks_H=sinks_H)
        return out_NHD
