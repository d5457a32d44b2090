"""Attention over the paged KV cache of a group of layers, with torch alone (SDPA): the reference.

Tokens of a step are ordered: first those of the B sequences that decode, one each or a few with drafts, then
the chunks of the sequences that bring more. The first group is one padded SDPA call; each chunk is a call of
its own. Everything that depends on the schedule only (slots, masks) is built once per step, shared by layers.

Grouped-query attention costs no copies: the G query heads of a KV head become G query rows (decoding
group, where drafts alone are copied) or a stride-0 batch dimension of the keys (chunks). Calls of their own
for sequences with three drafts take 2.5 times as long for 4 contexts of 150 tokens, 1.6 times for 16.

Of a sliding window only what some row of a sequence sees is gathered: pages below it may be another's by now.

Legend: N tokens of the step, M of them decoding, B decoding sequences, T tokens of a chunk or the most of a
decoding sequence, L context that is gathered, P pages of a row of the table, S slots of the cache
(pages * page size), Hq/Hkv query/KV heads, G = Hq/Hkv, Q query rows: T * G, or 1 for any number alike, D head
size. A slot holds keys and values of one token, layer and head, [2, D]: gathered
contexts then lie head by head, which on a CPU is worth a third of the time from 400 tokens on (a token's
heads side by side put neighbouring tokens a power of two apart, in the same few cache sets).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention.backends import Chosen, Place, choose
from turnout.attention.interface import Attention, Chunk, PagedSequence
from turnout.attention.kinds import AttentionSpec, CacheGroup
from turnout.vocabulary import ComputeDtype, Device

ALIGNED = 64  # bytes, as torch's own memory is


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Where one chunk's rows and context are."""

    rows: slice  # of the step's N tokens
    slots_L: Tensor | None  # None: the chunk is its own whole context
    mask_TL: Tensor | None  # added to scores; None: plain causal


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """What attention must know about a step; the same for all layers."""

    write_N: Tensor  # int64: slot of each new token
    num_decoding: int  # M
    rows_BT: Tensor | None  # int64: which of the M tokens; padding repeats the last. None: T is 1
    places_M: Tensor | None  # int64: where these are in [B * T]; None: T is 1
    slots_BL: Tensor  # int64 [B * L], padding repeats valid slots
    mask_B1QL: Tensor  # 0 or -inf in the compute dtype
    chunks: tuple[ChunkLayout, ...]


class PagedAttention:
    """Owns the KV cache and the page table of a group of layers; `laid_out` gives the attention of a step."""

    def __init__(
        self,
        group: CacheGroup,
        *,
        number: int = 0,
        num_pages: int,
        page_size: int,
        max_running: int,
        max_context: int,
        device: torch.device,
        dtype: torch.dtype,
        fixed_spans: int = 0,
        chosen: Chosen | None = None,
    ):
        """group: its heads are those of this rank. number: of the group in `PagedSequence.kv`. chosen: what
        computes it; None: what suits the device.
        fixed_spans: into so many are contexts cut by kernels that cut them; 0: what suits a batch.
        """
        self.number, self.spec = number, group.spec
        self.chosen = chosen or choose(group.spec, place_of(device, dtype, page_size))
        spec = group.spec
        self.index = {layer: i for i, layer in enumerate(group.layers)}  # of the model's layers in the cache
        self.page_size, self.fixed_spans = page_size, fixed_spans
        self.device, self.dtype = device, dtype
        self.processors = 1
        if device.type == "cuda":
            self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.group = spec.num_heads // spec.num_kv_heads
        # Of a window, places below it count too, though no page is held there.
        self._pages_per_row = -(-max_context // page_size)
        if not spec.window:
            self._pages_per_row = min(self._pages_per_row, num_pages)
        # One page more than there are, for what padding writes.
        self.spare_slot = num_pages * page_size
        slots = self.spare_slot + page_size
        size = (len(group.layers), *self._layer_size(slots))
        self._cache = _zeros(size, dtype, device)
        self._table_RP = torch.zeros(max_running, self._pages_per_row, dtype=torch.int64)
        # The same on the device, where graphs read it: row r has the first `_copied[r]` pages. The last row
        # is padding's, and owns the spare page.
        self.spare_row = max_running
        self.table = torch.full((max_running + 1, self._pages_per_row), num_pages, device=device)
        self._copied = [0] * max_running

    def _layer_size(self, slots: int) -> tuple[int, ...]:
        """The cache of one layer."""
        return self.spec.num_kv_heads, slots, 2, self.spec.head_dim

    @property
    def cache_bytes(self) -> int:
        return self._cache.numel() * self._cache.element_size()

    @property
    def state_bytes(self) -> int:
        """Of what is kept of running requests next to pages."""
        return 0

    def copy_state(self, source: int, target: int) -> None:
        """What is kept of a request next to pages, from its slot to another."""

    @property
    def cache(self) -> Tensor:
        """[layers, Hkv, slots, 2, D], the last page spare."""
        return self._cache

    def layer_cache(self, layer: int) -> Tensor:
        """[Hkv, slots, 2, D] of a layer of the model."""
        return self._cache[self.index[layer]]

    def place_singles(self, chunks: Sequence[Chunk]) -> list[int]:
        """Slots that chunks of one token each write to. `table` then has the pages of their contexts but for
        the last, which whoever writes to the slot adds."""
        slots, behind = [], []
        copied, size = self._copied, self.page_size
        for chunk in chunks:
            request, start = chunk.request, chunk.start
            held = request.kv[self.number]
            row, pages, page = request.row, held.pages, start // size
            if held.placed < len(pages):
                self._place(request)
            if page >= copied[row]:
                if page > copied[row]:
                    behind.append(row)
                copied[row] = page + 1
            slots.append(pages[page] * size + start % size)
        if behind:
            rows, pages_BP = to_device([torch.tensor(behind), self._table_RP[behind]], self.device)
            self.table.index_copy_(0, rows, pages_BP)
        return slots

    def place_rows(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """On the host: places [N] of the tokens of `chunks` in their sequences, slots [N] that they write to,
        pages [B, P] of each chunk's context, and which chunk is each token's [N]."""
        for chunk in chunks:
            self._place(chunk.request)
        rows_B, starts_B, ends_B = torch.tensor(
            [[c.request.row for c in chunks], [c.start for c in chunks], [c.end for c in chunks]],
            dtype=torch.int64,
        )
        lengths_B = ends_B - starts_B
        owners_N = torch.repeat_interleave(lengths_B)
        firsts_B = lengths_B.cumsum(0) - lengths_B
        places_N = torch.arange(len(owners_N)) + (starts_B - firsts_B)[owners_N]
        pages = -(-max((c.end for c in chunks), default=0) // self.page_size)
        slots_N = self._single_slots(rows_B[owners_N], places_N)
        return places_N, slots_N, self._table_RP[rows_B, :pages], owners_N

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        """The attention of a step, or of one of its micro-batches: tokens of `decoding`, one each and perhaps
        drafts, then of `chunks`."""
        return _LaidOut(self, self._layout(decoding, chunks))

    def _layout(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> StepLayout:
        """Where the tokens of a step are stored, and what they see."""
        for chunk in (*decoding, *chunks):
            self._place(chunk.request)
        lengths = [c.length for c in decoding]
        rows_BT, places_M = _padded_rows(lengths)
        owners_M = torch.tensor([c.request.row for c in decoding for _ in range(c.length)], dtype=torch.int64)
        ends_M = torch.tensor([i for c in decoding for i in range(c.start + 1, c.end + 1)], dtype=torch.int64)
        slots_BL, seen_BQL = self._padded_contexts([c.request.row for c in decoding], ends_M[rows_BT])
        contexts = [self._slots(c.request.row, self.spec.first_seen(c.start), c.end) for c in chunks]
        writes = [self._single_slots(owners_M, ends_M - 1)]
        writes += [slots_L[-c.length :] for c, slots_L in zip(chunks, contexts, strict=True)]
        write_N, slots_BL, seen_BQL, rows_BT, places_M, *contexts = to_device(
            [torch.cat(writes), slots_BL, seen_BQL, rows_BT, places_M, *contexts], self.device
        )
        at = sum(lengths)
        layouts = []
        for chunk, slots_L in zip(chunks, contexts, strict=True):
            layouts.append(self._chunk_layout(chunk, at, slots_L))
            at += chunk.length
        several = rows_BT.shape[1] > 1
        return StepLayout(
            write_N=write_N,
            num_decoding=sum(lengths),
            rows_BT=rows_BT if several else None,
            places_M=places_M if several else None,
            slots_BL=slots_BL.view(-1),
            mask_B1QL=additive(seen_BQL > 0, self.dtype)[:, None],
            chunks=tuple(layouts),
        )

    def attend_laid_out(
        self,
        layout: StepLayout,
        layer: int,
        q_NHD: Tensor,
        k_NHD: Tensor,
        v_NHD: Tensor,
        sinks_H: Tensor | None,
    ) -> Tensor:
        cache_HS2D, scale = self.layer_cache(layer), self.spec.scale
        cache_HS2D.index_copy_(1, layout.write_N, torch.stack((k_NHD, v_NHD), dim=2).transpose(0, 1))
        parts = []
        if layout.num_decoding:
            q_MHD = q_NHD[: layout.num_decoding]
            k_HXD, v_HXD = cache_HS2D.index_select(1, layout.slots_BL).unbind(2)
            parts.append(attend_decoding(q_MHD, k_HXD, v_HXD, layout, scale, sinks_H))
        for chunk in layout.chunks:
            if chunk.slots_L is None:
                k_HLD, v_HLD = k_NHD[chunk.rows].transpose(0, 1), v_NHD[chunk.rows].transpose(0, 1)
            else:
                k_HLD, v_HLD = cache_HS2D.index_select(1, chunk.slots_L).unbind(2)
            parts.append(attend_chunk(q_NHD[chunk.rows], k_HLD, v_HLD, chunk.mask_TL, scale, sinks_H))
        if not parts:  # this rank has no tokens, but takes part
            return q_NHD
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _place(self, request: PagedSequence) -> None:
        """Bring the page table up to date with the pages of `request`."""
        held = request.kv[self.number]
        if held.placed < len(held.pages):
            self._copied[request.row] = min(self._copied[request.row], held.placed)
            fresh = torch.tensor(held.pages[held.placed :])
            self._table_RP[request.row, held.placed : len(held.pages)] = fresh
            held.placed = len(held.pages)

    def _single_slots(self, rows_B: Tensor, places_B: Tensor) -> Tensor:
        pages_B = self._table_RP[rows_B, places_B // self.page_size]
        return pages_B * self.page_size + places_B % self.page_size

    def _slots(self, row: int, start: int, end: int) -> Tensor:
        places_L = torch.arange(start, end)
        return self._table_RP[row, places_L // self.page_size] * self.page_size + places_L % self.page_size

    def _padded_contexts(self, rows: Sequence[int], ends_BT: Tensor) -> tuple[Tensor, Tensor]:
        """On the host: slots [B, L] of what the sequences in these rows of the table see, and whether each
        query row sees it, int64 [B, Q, L].

        Padding repeats a slot of the sequence: whatever another request left in a page, NaN
        included, is never read, not even to be masked.
        """
        firsts_BT = (
            (ends_BT - self.spec.window).clamp(min=0) if self.spec.window else torch.zeros_like(ends_BT)
        )
        length = int((ends_BT[:, -1] - firsts_BT[:, 0]).max()) if len(rows) else 0
        places_BL = firsts_BT[:, :1] + torch.arange(length)
        places_BL = torch.where(places_BL < ends_BT[:, -1:], places_BL, firsts_BT[:, :1])
        slots_BL = self._single_slots(torch.tensor(rows, dtype=torch.int64)[:, None], places_BL)
        offered_BL = firsts_BT[:, :1] + torch.arange(length)
        seen_BTL = (offered_BL[:, None] < ends_BT[..., None]) & (offered_BL[:, None] >= firsts_BT[..., None])
        heads = self.group if ends_BT.shape[1] > 1 else 1
        return slots_BL, seen_BTL.repeat_interleave(heads, dim=1).long()

    def _chunk_layout(self, chunk: Chunk, at: int, slots_L: Tensor) -> ChunkLayout:
        rows = slice(at, at + chunk.length)
        if chunk.start == 0 and not self.spec.sinks and not 0 < self.spec.window < chunk.end:
            return ChunkLayout(rows=rows, slots_L=None, mask_TL=None)
        first = self.spec.first_seen(chunk.start)
        seen_TL = visible(self.spec, chunk.start, chunk.end, first, self.device)
        return ChunkLayout(rows=rows, slots_L=slots_L, mask_TL=additive(seen_TL, self.dtype))


@dataclass(frozen=True)
class _LaidOut(Attention):
    """Of a step, or one of its micro-batches."""

    paged: PagedAttention
    layout: StepLayout

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        return self.paged.attend_laid_out(self.layout, layer, q_NHD, k_NHD, v_NHD, sinks_H)


def place_of(device: torch.device, dtype: torch.dtype, page_size: int) -> Place:
    """`Place` of tensors: devices and dtypes of torch under the names that plans have for them."""
    name = cast(ComputeDtype, str(dtype).removeprefix("torch."))
    return Place(device=cast(Device, device.type), dtype=name, page_size=page_size)


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host int64 tensors on `device`, in one transfer rather than one each."""
    if device.type == "cpu":
        return list(tensors)
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).pin_memory()
    parts = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _padded_rows(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(rows [B, T] of sequences of `lengths`, one after the other; their places [M] in [B * T])."""
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    steps_T = torch.arange(max(lengths, default=1))
    starts_B = lengths_B.cumsum(0) - lengths_B
    rows_BT = starts_B[:, None] + torch.minimum(steps_T, lengths_B[:, None] - 1)
    return rows_BT, (steps_T < lengths_B[:, None]).view(-1).nonzero().view(-1)


def visible(spec: AttentionSpec, start: int, end: int, first: int, device: torch.device) -> Tensor:
    """bool [end - start, end - first]: whether a token at start, start + 1, ... sees what is at first, ..."""
    own_T1 = torch.arange(start, end, device=device)[:, None]
    other_L = torch.arange(first, end, device=device)
    seen_TL = other_L <= own_T1
    return seen_TL & (other_L > own_T1 - spec.window) if spec.window else seen_TL


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 where seen, else -inf."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def attend_decoding(
    q_MHD: Tensor,
    k_HXD: Tensor,
    v_HXD: Tensor,
    layout: StepLayout,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """A few query tokens per sequence over its padded context: [M, Hq, D] -> [M, Hq, D of values].

    k, v: of the slots [B * L] of `layout`, [Hkv, B * L, D] each.
    """
    M, Hq, D = q_MHD.shape
    Hkv = len(k_HXD)
    B, T = (M, 1) if layout.rows_BT is None else layout.rows_BT.shape
    k_BHLD, v_BHLD = (x_HXD.unflatten(1, (B, -1)).transpose(0, 1) for x_HXD in (k_HXD, v_HXD))
    q_BTHD = q_MHD if layout.rows_BT is None else q_MHD[layout.rows_BT]
    q_BHTGD = q_BTHD.view(B, T, Hkv, Hq // Hkv, D).transpose(1, 2)
    q_BHQD = q_BHTGD.reshape(B, Hkv, -1, D)
    if sinks_H is None:
        out_BHQD = F.scaled_dot_product_attention(
            q_BHQD, k_BHLD, v_BHLD, attn_mask=layout.mask_B1QL, scale=scale
        )
    else:
        sinks_HQ = sinks_H.view(Hkv, -1).repeat(1, T)
        out_BHQD = _with_sinks(q_BHQD, k_BHLD, v_BHLD, layout.mask_B1QL, scale, sinks_HQ)
    if layout.places_M is None:
        return out_BHQD.reshape(B, Hq, -1)
    out_BTHD = out_BHQD.reshape(B, Hkv, T, Hq // Hkv, -1).transpose(1, 2)
    return out_BTHD.reshape(B * T, Hq, -1)[layout.places_M]


def attend_chunk(
    q_THD: Tensor,
    k_HLD: Tensor,
    v_HLD: Tensor,
    mask_TL: Tensor | None,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """T tokens over a context of L: [T, Hq, D] -> [T, Hq, D of values].

    mask_TL is added to the scores; None: plain causal, T equal to L. sinks: float32 [Hq], with a mask only.
    """
    T, Hq, D = q_THD.shape
    Hkv = len(k_HLD)
    G = Hq // Hkv
    q_GHTD = q_THD.view(T, Hkv, G, D).permute(2, 1, 0, 3)
    k_GHLD, v_GHLD = k_HLD.expand(G, -1, -1, -1), v_HLD.expand(G, -1, -1, -1)
    if sinks_H is None:
        out_GHTD = F.scaled_dot_product_attention(
            q_GHTD, k_GHLD, v_GHLD, attn_mask=mask_TL, is_causal=mask_TL is None, scale=scale
        )
    else:
        assert mask_TL is not None
        out_GHTD = _with_sinks(q_GHTD, k_GHLD, v_GHLD, mask_TL, scale, sinks_H.view(Hkv, G).T[..., None])
    return out_GHTD.permute(2, 1, 0, 3).reshape(T, Hq, -1)


def _with_sinks(
    q_XQD: Tensor, k_XLD: Tensor, v_XLD: Tensor, mask: Tensor, scale: float, sinks: Tensor
) -> Tensor:
    """As SDPA, where each query row [X, Q] has one more score, `sinks` (broadcast to [X, Q]), of value 0."""
    scores_XQL = (q_XQD @ k_XLD.transpose(-1, -2)).float() * scale + mask
    sinks_XQ1 = sinks.expand(scores_XQL.shape[:-1])[..., None]
    weights_XQL = torch.cat((scores_XQL, sinks_XQ1), dim=-1).softmax(dim=-1)[..., :-1]
    return weights_XQL.to(v_XLD.dtype) @ v_XLD


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros, but on a CPU memory is taken where it is first written, and not at once."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    count = math.prod(size) * dtype.itemsize
    bytes_B = torch.from_numpy(np.zeros(count + ALIGNED, dtype=np.uint8))
    start = -bytes_B.data_ptr() % ALIGNED
    return bytes_B[start : start + count].view(dtype).view(size)
