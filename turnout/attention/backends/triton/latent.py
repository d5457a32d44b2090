"""Latent attention on CUDA: tokens that decode by kernels (kernels/attention/latent.py), prompts whose keys
and values are made by another (latent_prefill.py), other chunks by torch.

With an indexer kernels also score and choose, for all tokens (kernels/attention/index.py).

Legend: N tokens of a step, M of them decoding, R some tokens, P pages of a row of a table, H heads, D/Dv
sizes of keys and values, C what is kept of a token, S slots of the cache, L tokens of a context, K =
index_topk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from turnout.attention.indexing import Index
from turnout.attention.interface import Attention, Chunk
from turnout.attention.latent import LatentAttention, expands
from turnout.attention.paged import to_device
from turnout.attention.rows import StoredAttention
from turnout.attention.sparse_latent import SparseLatentAttention
from turnout.attention.up_projection import UpProjection
from turnout.attention.workspace import LATENT_CONTEXTS, SPARSE_ROWS

ROWS = 8 * SPARSE_ROWS  # whose scores take less than what torch's ranking of SPARSE_ROWS does


class TritonLatent(LatentAttention):
    """Latent attention, whose decoding tokens kernels compute."""

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        return LatentStep(self, decoding, chunks)

    def rows(
        self, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor, states_N: Tensor | None = None
    ) -> Attention:
        return LatentRows(self, slots_N, table_NP, ends_N)


class TritonSparseLatent(SparseLatentAttention):
    """Sparse latent attention, whose decoding tokens choose and attend by kernels."""

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        return SparseLatentStep(self, decoding, chunks)

    def rows(
        self, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor, states_N: Tensor | None = None
    ) -> Attention:
        return SparseLatentRows(self, slots_N, table_NP, ends_N)


class LatentRows(StoredAttention):
    """Of one token per row, whose pages and lengths are read on the device."""

    def __init__(self, paged: LatentAttention, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor):
        """As `PagedAttention.rows`."""
        super().__init__(paged, slots_N)
        self._latents, self._table_NP, self._ends_N = paged, table_NP, ends_N
        self._splits = latent_spans(paged, len(slots_N))

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        new = latent_NC, self._slots_N
        return attend_absorbed(
            self._latents, layer, q_NHD, up, self._table_NP, self._ends_N, splits=self._splits, new=new
        )


class SparseLatentRows(StoredAttention):
    """As `LatentRows`, over what each token chooses."""

    def __init__(self, paged: SparseLatentAttention, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor):
        super().__init__(paged, slots_N)
        self._sparse, self._table_NP, self._ends_N = paged, table_NP, ends_N
        self._chosen_NK: Tensor  # by the last layer that chose

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        paged = self._sparse
        if index is not None:
            keys_SD = plain_keys(paged, layer, self._slots_N, index)
            self._chosen_NK = choose_rows(paged, keys_SD, index, self._table_NP, self._ends_N)
        new = latent_NC, self._slots_N
        return attend_chosen(paged, layer, self._chosen_NK, q_NHD, up, new=new)


class LatentStep(StoredAttention):
    """Of a step in a group of latent layers: decoding tokens and prompts by kernels, other chunks by torch
    (latent.py)."""

    def __init__(self, paged: LatentAttention, decoding: Sequence[Chunk], chunks: Sequence[Chunk]):
        places_N, slots_N, table_BP, owners_N = paged.place_rows([*decoding, *chunks])
        self._num_decoding = M = sum(chunk.length for chunk in decoding)
        self.places_N, slots_N, self._table_MP = to_device(
            [places_N, slots_N, table_BP[owners_N[:M]]], paged.device
        )
        super().__init__(paged, slots_N)
        self._ends_M = self.places_N[:M] + 1
        self._splits = latent_spans(paged, max(1, M))
        self._lay_out(paged, chunks)

    def _lay_out(self, paged: LatentAttention, chunks: Sequence[Chunk]) -> None:
        self._prompts, rest = prompts(paged, chunks, self._num_decoding)
        self._chunks = [layout for at, chunk in rest for layout in paged.chunk_layouts([chunk], at)]

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        paged, M = self._paged, self._num_decoding
        assert isinstance(paged, LatentAttention)
        decode = partial(
            attend_absorbed, paged, layer, q_NHD[:M], up, self._table_MP, self._ends_M, splits=self._splits
        )
        if len(q_NHD) == M:
            return decode(new=(latent_NC, self._slots_N))
        cache_SC = paged.store(layer, self._slots_N, latent_NC)
        out_NHV = q_NHD.new_empty(len(q_NHD), *up.values_size)
        out_NHV[:M] = decode()
        if self._prompts is not None:
            self._prompts.attend(cache_SC, q_NHD, latent_NC, up, paged.spec.scale, out_NHV)
        for chunk in self._chunks:
            rows = chunk.rows
            out_NHV[rows] = paged.attend_chunk(chunk, cache_SC, q_NHD[rows], latent_NC[rows], up)
        return out_NHV


@dataclass(frozen=True)
class Prompts:
    """Chunks of a step whose keys and values are made for all of their contexts, one after the other.

    tiles: as of `prefill.tiles`. slots: int64 [L] of these contexts; None: they are rows of the step.
    """

    tiles_TF: Tensor
    slots_L: Tensor | None

    def attend(
        self,
        cache_SC: Tensor,
        q_NHD: Tensor,
        latent_NC: Tensor,
        up: UpProjection,
        scale: float,
        out_NHV: Tensor,
    ) -> None:
        """Fill the rows of `out` of these chunks."""
        from turnout.kernels.attention import latent_prefill

        Dv, rope = up.values_size[1], q_NHD.shape[2] - up.nope_dim
        parts = latent_prefill.key_parts(up.nope_dim, rope, Dv)
        assert parts is not None
        latent_LC = latent_NC if self.slots_L is None else cache_SC.index_select(0, self.slots_L)
        latent_prefill.attend(
            q_NHD.contiguous(),
            up.made(latent_LC),
            latent_LC.contiguous(),
            self.tiles_TF,
            out_NHV,
            scale=scale,
            parts=parts,
            sizes=latent_prefill.tiles_for(Dv, q_NHD.element_size()),
        )


def prompts(
    paged: LatentAttention, chunks: Sequence[Chunk], at: int
) -> tuple[Prompts | None, list[tuple[int, Chunk]]]:
    """What the kernel computes of these chunks, the rows of the first of which begin at `at`; and the others,
    each with its first row: short ones, those whose contexts are too long to make at once, and what another
    backend was chosen for."""
    from turnout.kernels.attention import latent_prefill
    from turnout.kernels.attention.prefill import tiles

    spec, tokens = paged.spec, sum(chunk.length for chunk in chunks)
    made = spec.num_heads * (spec.head_dim - spec.rope_dim + spec.value_dim)
    most, rows_of_step = latent_prefill.MOST_VALUES // made, at + tokens
    left = min(LATENT_CONTEXTS * tokens, most)
    taken: list[tuple[int, Chunk]] = []
    others: list[tuple[int, Chunk]] = []
    known = latent_prefill.key_parts(spec.head_dim - spec.rope_dim, spec.rope_dim, spec.value_dim)
    for chunk in chunks:
        fits = known is not None and expands(spec, chunk.start, chunk.length) and chunk.end <= left
        fits = fits and not (paged.chosen and paged.chosen.takes_prompts([chunk.length]))
        (taken if fits else others).append((at, chunk))
        left -= chunk.end if fits else 0
        at += chunk.length
    if not taken:
        return None, others
    whole = all(chunk.start == 0 for _, chunk in taken) and rows_of_step <= most
    begins = [at for at, _ in taken]
    if not whole:
        begins = [sum(chunk.end for _, chunk in taken[:i]) for i in range(len(taken))]
    described = [
        (row, chunk.start, chunk.end, begin) for (row, chunk), begin in zip(taken, begins, strict=True)
    ]
    rows = latent_prefill.tiles_for(spec.value_dim, paged.cache.element_size()).rows
    uploaded = [tiles(described, rows)]
    if not whole:
        uploaded.append(torch.cat(paged.context_slots([chunk for _, chunk in taken])))
    tiles_TF, *slots = to_device(uploaded, paged.device)
    return Prompts(tiles_TF, slots[0] if slots else None), others


class SparseLatentStep(LatentStep):
    """Of a step in a group of sparse latent layers. Chunks that see no more than they may choose are computed
    as `LatentStep` does; of others each token reads what it chose."""

    def __init__(self, paged: SparseLatentAttention, decoding: Sequence[Chunk], chunks: Sequence[Chunk]):
        super().__init__(paged, decoding, chunks)
        self._sparse, self._contexts = paged, [paged.chunk_contexts(chunk) for chunk in chunks]
        self._chosen: list[Tensor | None] = [None] * (1 + len(chunks))  # of decoding tokens, then of chunks

    def _lay_out(self, paged: LatentAttention, chunks: Sequence[Chunk]) -> None:
        self._chunks = paged.chunk_layouts(chunks, self._num_decoding)

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        paged = self._sparse
        cache_SC = paged.store(layer, self._slots_N, latent_NC)
        if index is not None:
            self._choose(plain_keys(paged, layer, self._slots_N, index), index)
        parts = []
        for chosen, rows in zip(self._chosen, self._rows(), strict=True):
            q_RHD = q_NHD[rows]
            if chosen is not None:
                parts.append(attend_chosen(paged, layer, chosen, q_RHD, up))
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
                slots_RL = contexts.slots.expand(len(contexts.ends_R), -1)
                some = index.rows(rows)
                chosen = choose_rows(self._sparse, keys_SD, some, slots_RL, contexts.ends_R, page_size=1)
            self._chosen.append(chosen)


def latent_spans(paged: LatentAttention, rows: int) -> int:
    """Into how many the kernel cuts contexts, as `rows.spans`."""
    from turnout.kernels.attention import latent

    longest = paged.table.shape[1] * paged.page_size
    return latent.spans(rows, paged.spec.num_heads, longest, paged.processors)


def plain_keys(paged: SparseLatentAttention, layer: int, slots_N: Tensor, index: Index) -> Tensor:
    """The index keys [S, Di] of a layer, once they hold these."""
    keys_SD = paged.store_index(layer, slots_N, index.key_ND)
    assert isinstance(keys_SD, Tensor), "this backend is not chosen for keys in FP8"
    return keys_SD


def choose_rows(
    paged: SparseLatentAttention,
    keys_SD: Tensor,
    index: Index,
    table_NP: Tensor,
    ends_N: Tensor,
    *,
    page_size: int = 0,
) -> Tensor:
    """int32 [N, K]: the slots that tokens choose among the first ends [N] of the pages [N, P], then -1.

    page_size: 0: that of `paged`. ROWS tokens at a time, whose scores fill the table.
    """
    from turnout.kernels.attention.index import chosen, scores

    K, size, parts = paged.spec.index_topk, page_size or paged.page_size, []
    for start in range(0, len(ends_N), ROWS):
        rows = slice(start, start + ROWS)
        table_RP, ends_R = table_NP[rows], ends_N[rows].contiguous()
        some = index.rows(rows)
        scores_RL = scores(
            some.q_NHD.contiguous(), some.weights_NH.contiguous(), keys_SD, table_RP, ends_R, page_size=size
        )
        parts.append(chosen(scores_RL, table_RP, ends_R, K, page_size=size)[0])
    return torch.cat(parts) if parts else table_NP.new_empty(0, K, dtype=torch.int32)


def attend_absorbed(
    paged: LatentAttention,
    layer: int,
    q_RHD: Tensor,
    up: UpProjection,
    table_RP: Tensor,
    ends_R: Tensor,
    *,
    splits: int,
    page_size: int = 0,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[R, H, Dv] of tokens that see the first ends [R] of the pages [R, P]. page_size: 0: that of `paged`.
    new: what these tokens leave in the cache first, [R, C], and in which slots [R]; None: it is there."""
    from turnout.kernels.attention import latent, latent_heads

    spec, cache_SC = paged.spec, paged.layer_cache(layer)
    if latent_heads.takes(q_RHD, latent_heads.MOST_ROWS):
        kept = new and (new[0].contiguous(), new[1], cache_SC)
        q_RHC = latent_heads.absorbed(q_RHD.contiguous(), up.keys_HNL, kept)
    else:
        if new is not None:
            paged.store(layer, new[1], new[0])
        q_RHC = up.absorb(q_RHD)
    mixed_RHL = latent.attend(
        q_RHC,
        cache_SC,
        table_RP,
        ends_R,
        latent_dim=spec.latent_dim,
        page_size=page_size or paged.page_size,
        splits=splits,
        scale=spec.scale,
    )
    if latent_heads.takes(mixed_RHL, latent_heads.MOST_OF_VALUES):
        return latent_heads.values(mixed_RHL, up.values_HVL)
    return up.values(mixed_RHL)


def attend_chosen(
    paged: SparseLatentAttention,
    layer: int,
    chosen_RK: Tensor,
    q_RHD: Tensor,
    up: UpProjection,
    *,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[R, H, Dv] over the slots [R, K] that each token chose: pages of one token each to the kernel. new: as
    of `attend_absorbed`."""
    from turnout.kernels.attention import latent

    spec, ends_R = paged.spec, (chosen_RK >= 0).sum(1)
    splits = latent.spans(max(1, len(q_RHD)), spec.num_heads, spec.index_topk, paged.processors)
    return attend_absorbed(paged, layer, q_RHD, up, chosen_RK, ends_R, splits=splits, page_size=1, new=new)
