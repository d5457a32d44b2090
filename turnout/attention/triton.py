"""Attention on CUDA by kernels over the paged cache (kernels/attention/decode.py, prefill.py).

Unlike attention.py's it gathers no context and makes no mask, and the kernel that rotates keys stores them.

Legend: N tokens of a step, M of them decoding, B chunks, P pages of the widest context, F fields of a tile,
Hq/Hkv query/KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnout.attention.backends import SPARSE_ROWS
from turnout.attention.flash_attn_4 import FlashAttn4Prompts, takes_prompts
from turnout.attention.indexing import Index, largest, places
from turnout.attention.interface import Attention, Chunk
from turnout.attention.latent import LatentAttention
from turnout.attention.sparse_latent import SparseLatentAttention
from turnout.attention.torch import PagedAttention, to_device
from turnout.attention.up_projection import UpProjection


class _Stored(Attention):
    """Over a cache that holds each token in a slot."""

    def __init__(self, paged: PagedAttention, slots_N: Tensor):
        self._paged, self._slots_N = paged, slots_N

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        cache_HS2D, slots_N = self.place(layer)
        cache_HS2D.index_copy_(1, slots_N, torch.stack((k_NHD, v_NHD), dim=2).transpose(0, 1))
        return self.attend(layer, q_NHD, sinks_H)

    def place(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._paged.layer_cache(layer), self._slots_N

    def _spans(self, rows: int) -> int:
        """By what contexts may become, not by what they are: each number is a kernel of its own."""
        from turnout.kernels.attention import latent
        from turnout.kernels.attention.decode import spans

        paged = self._paged
        longest = paged.table.shape[1] * paged.page_size
        if isinstance(paged, LatentAttention):
            return latent.spans(rows, paged.spec.num_heads, longest, paged.processors)
        longest = min(longest, paged.spec.window or longest)
        return paged.fixed_spans or spans(rows, paged.cache.shape[1], longest, paged.processors)


class RowAttention(_Stored):
    """Of one token per row, whose rows and lengths are read on the device."""

    def __init__(self, paged: PagedAttention, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor):
        """slots, table, ends: int64; an end of 0 makes a row padding, which attends to nothing."""
        super().__init__(paged, slots_N)
        self._table_NP, self._ends_N = table_NP, ends_N
        self._splits = self._spans(len(slots_N))
        self._chosen_NK: Tensor  # by the last layer that chose

    def attend(
        self, layer: int, q_NHD: Tensor, sinks_H: Tensor | None = None, out_NHD: Tensor | None = None
    ) -> Tensor:
        from turnout.kernels.attention.decode import attend

        return attend(
            q_NHD.contiguous(),
            self._paged.layer_cache(layer),
            self._table_NP,
            self._ends_N,
            page_size=self._paged.page_size,
            splits=self._splits,
            scale=self._paged.spec.scale,
            window=self._paged.spec.window,
            sinks_H=sinks_H,
            out_BHD=out_NHD,
        )

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        assert isinstance(self._paged, LatentAttention)
        cache_SC = self._paged.store(layer, self._slots_N, latent_NC)
        if isinstance(self._paged, SparseLatentAttention):
            if index is not None:
                keys_SD = self._paged.store_index(layer, self._slots_N, index.key_ND)
                self._chosen_NK = choose_rows(self._paged, keys_SD, index, self._table_NP, self._ends_N)
            return attend_chosen(self._paged, self._chosen_NK, cache_SC, q_NHD, up)
        return attend_absorbed(
            self._paged, cache_SC, q_NHD, up, self._table_NP, self._ends_N, splits=self._splits
        )


class LatentStep(_Stored):
    """Of a step in a group of latent layers: decoding tokens by the kernel, chunks by torch (latent.py)."""

    def __init__(self, paged: LatentAttention, decoding: Sequence[Chunk], chunks: Sequence[Chunk]):
        places_N, slots_N, table_BP, owners_N = paged.place_rows([*decoding, *chunks])
        self._num_decoding = M = sum(chunk.length for chunk in decoding)
        self.places_N, slots_N, self._table_MP = to_device(
            [places_N, slots_N, table_BP[owners_N[:M]]], paged.device
        )
        super().__init__(paged, slots_N)
        self._ends_M = self.places_N[:M] + 1
        self._chunks = paged.chunk_layouts(chunks, M)
        self._splits = self._spans(max(1, M))

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        paged, M = self._paged, self._num_decoding
        assert isinstance(paged, LatentAttention)
        cache_SC = paged.store(layer, self._slots_N, latent_NC)
        parts = [
            attend_absorbed(paged, cache_SC, q_NHD[:M], up, self._table_MP, self._ends_M, splits=self._splits)
        ]
        for chunk in self._chunks:
            parts.append(paged.attend_chunk(chunk, cache_SC, q_NHD[chunk.rows], latent_NC[chunk.rows], up))
        return torch.cat(parts)


class SparseLatentStep(LatentStep):
    """Of a step in a group of sparse latent layers. Chunks that see no more than they may choose are computed
    as `LatentStep` does; of others each token reads what it chose."""

    def __init__(self, paged: SparseLatentAttention, decoding: Sequence[Chunk], chunks: Sequence[Chunk]):
        super().__init__(paged, decoding, chunks)
        self._sparse, self._contexts = paged, [paged.chunk_contexts(chunk) for chunk in chunks]
        self._chosen: list[Tensor | None] = [None] * (1 + len(chunks))  # of decoding tokens, then of chunks

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        paged = self._sparse
        cache_SC = paged.store(layer, self._slots_N, latent_NC)
        if index is not None:
            self._choose(paged.store_index(layer, self._slots_N, index.key_ND), index)
        parts = []
        for chosen, rows in zip(self._chosen, self._rows(), strict=True):
            q_RHD = q_NHD[rows]
            if chosen is not None:
                parts.append(attend_chosen(paged, chosen, cache_SC, q_RHD, up))
            else:
                chunk = self._chunks[len(parts) - 1]
                parts.append(paged.attend_chunk(chunk, cache_SC, q_RHD, latent_NC[rows], up))
        return torch.cat(parts)

    def _rows(self) -> list[slice]:
        return [slice(0, self._num_decoding), *(chunk.rows for chunk in self._chunks)]

    def _choose(self, keys_SD: Tensor, index: Index) -> None:
        decoding, *chunks = self._rows()
        own = index.rows(decoding)
        self._chosen = [choose_rows(self._sparse, keys_SD, own, self._table_MP, self._ends_M)]
        for contexts, rows in zip(self._contexts, chunks, strict=True):
            chosen = None
            if contexts is not None:
                chosen = self._sparse.choose(contexts, keys_SD, index.rows(rows))
            self._chosen.append(chosen)


def choose_rows(
    paged: SparseLatentAttention, keys_SD: Tensor, index: Index, table_NP: Tensor, ends_N: Tensor
) -> Tensor:
    """int32 [N, K]: the slots that tokens choose among the first ends [N] of the pages [N, P], then -1.

    Of fixed shapes, for graphs: all of the table is ranked, SPARSE_ROWS tokens at a time.
    """
    from turnout.kernels.attention.index import scores

    K, size, parts = paged.spec.index_topk, paged.page_size, [table_NP.new_empty(0, paged.spec.index_topk)]
    for start in range(0, len(ends_N), SPARSE_ROWS):
        rows = slice(start, start + SPARSE_ROWS)
        table_RP, ends_R = table_NP[rows].contiguous(), ends_N[rows].contiguous()
        some = index.rows(rows)
        scores_RL = scores(
            some.q_NHD.contiguous(), some.weights_NH.contiguous(), keys_SD, table_RP, ends_R, page_size=size
        )
        seen_RL = torch.arange(scores_RL.shape[1], device=ends_R.device) < ends_R[:, None]
        places_RK = places(largest(scores_RL, seen_RL, K), K)
        slots_RK = table_RP.gather(1, places_RK.clamp(min=0) // size) * size + places_RK % size
        parts.append(torch.where(places_RK < 0, -1, slots_RK))
    return torch.cat(parts).int()


def attend_absorbed(
    paged: LatentAttention,
    cache_SC: Tensor,
    q_RHD: Tensor,
    up: UpProjection,
    table_RP: Tensor,
    ends_R: Tensor,
    *,
    splits: int,
    page_size: int = 0,
) -> Tensor:
    """[R, H, Dv] of tokens that see the first ends [R] of the pages [R, P]. page_size: 0: that of `paged`."""
    from turnout.kernels.attention import latent

    spec = paged.spec
    mixed_RHL = latent.attend(
        up.absorb(q_RHD),
        cache_SC,
        table_RP,
        ends_R,
        latent_dim=spec.latent_dim,
        page_size=page_size or paged.page_size,
        splits=splits,
        scale=spec.scale,
    )
    return up.values(mixed_RHL)


def attend_chosen(
    paged: SparseLatentAttention, chosen_RK: Tensor, cache_SC: Tensor, q_RHD: Tensor, up: UpProjection
) -> Tensor:
    """[R, H, Dv] over the slots [R, K] that each token chose: pages of one token each to the kernel."""
    from turnout.kernels.attention import latent

    spec, ends_R = paged.spec, (chosen_RK >= 0).sum(1)
    splits = latent.spans(max(1, len(q_RHD)), spec.num_heads, spec.index_topk, paged.processors)
    return attend_absorbed(paged, cache_SC, q_RHD, up, chosen_RK, ends_R, splits=splits, page_size=1)


class StepAttention(_Stored):
    """Of a step: tokens of sequences that decode, then chunks of others."""

    def __init__(self, paged: PagedAttention, decoding: Sequence[Chunk], chunks: Sequence[Chunk]):
        from turnout.kernels.attention.prefill import tiles

        cache = paged.cache
        places_N, slots_N, table_BP, owners_N = paged.place_rows([*decoding, *chunks])
        self._num_decoding = at = sum(chunk.length for chunk in decoding)
        self._prompts = None
        if takes_prompts(paged, chunks):
            self._prompts = FlashAttn4Prompts(paged, chunks, table_BP[len(decoding) :])
            chunks = ()
        spans = []
        for owner, chunk in enumerate(chunks, len(decoding)):
            spans.append((at, chunk.start, chunk.end, owner))
            at += chunk.length
        tiles_TF = tiles(spans, paged.group)
        self.places_N, slots_N, self._table_BP, owners_N, self._tiles_TF = to_device(
            [places_N, slots_N, table_BP, owners_N, tiles_TF], cache.device
        )
        super().__init__(paged, slots_N)
        self._ends_M = self.places_N[: self._num_decoding] + 1
        self._table_MP = self._table_BP[owners_N[: self._num_decoding]]
        self._splits = self._spans(max(1, self._num_decoding))

    def attend(
        self, layer: int, q_NHD: Tensor, sinks_H: Tensor | None = None, out_NHD: Tensor | None = None
    ) -> Tensor:
        from turnout.kernels.attention import decode, prefill

        spec, cache_HS2D = self._paged.spec, self._paged.layer_cache(layer)
        page_size, scale, window = self._paged.page_size, spec.scale, spec.window
        q_NHD = q_NHD.contiguous()
        out_NHD = torch.empty_like(q_NHD) if out_NHD is None else out_NHD
        M = self._num_decoding
        decode.attend(
            q_NHD[:M],
            cache_HS2D,
            self._table_MP,
            self._ends_M,
            page_size=page_size,
            splits=self._splits,
            scale=scale,
            window=window,
            sinks_H=sinks_H,
            out_BHD=out_NHD[:M],
        )
        if self._prompts is not None:
            self._prompts.attend(layer, q_NHD[M:], out_NHD[M:], sinks_H)
            return out_NHD
        prefill.attend(
            q_NHD,
            cache_HS2D,
            self._tiles_TF,
            self._table_BP,
            out_NHD,
            page_size=page_size,
            scale=scale,
            window=window,
            sinks_H=sinks_H,
        )
        return out_NHD


def step_attention(
    paged: PagedAttention, decoding: Sequence[Chunk], chunks: Sequence[Chunk]
) -> StepAttention | LatentStep:
    """The attention of a step, or of one of its micro-batches, by kernels."""
    if isinstance(paged, SparseLatentAttention):
        return SparseLatentStep(paged, decoding, chunks)
    if isinstance(paged, LatentAttention):
        return LatentStep(paged, decoding, chunks)
    return StepAttention(paged, decoding, chunks)


def has_kernels(paged: PagedAttention) -> bool:
    """Whether `step_attention` serves this cache; in float32 tiles would not fit."""
    return paged.chosen is not None and paged.chosen.backend == "triton"
