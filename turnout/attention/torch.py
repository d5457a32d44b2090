"""Attention over paged keys and values with torch alone (SDPA): the reference.

Tokens of a step are ordered: first those of the B sequences that decode, one each or a few with drafts, then
the chunks of the sequences that bring more. The first group is one padded SDPA call; each chunk is a call of
its own. Everything that depends on the schedule only (slots, masks) is built once per step, shared by layers.

Grouped-query attention costs no copies: the G query heads of a KV head become G query rows (decoding
group, where drafts alone are copied) or a stride-0 batch dimension of the keys (chunks). Calls of their own
for sequences with three drafts take 2.5 times as long for 4 contexts of 150 tokens, 1.6 times for 16.

Of a sliding window only what some row of a sequence sees is gathered: pages below it may be another's by now.

Legend: N tokens of the step, M of them decoding, B decoding sequences, T tokens of a chunk or the most of a
decoding sequence, L context that is gathered, S slots of the cache, Hq/Hkv query/KV heads, G = Hq/Hkv, Q
query rows: T * G, or 1 for any number alike, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention.interface import Attention, Chunk
from turnout.attention.kinds import AttentionSpec
from turnout.attention.paged import PagedAttention, to_device
from turnout.attention.rows import RowAttention


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


class TorchAttention(PagedAttention):
    """Gathers the contexts of a step; single rows on CUDA are computed by a kernel (rows.py)."""

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        return _LaidOut(self, self._layout(decoding, chunks))

    def rows(
        self, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor, states_N: Tensor | None = None
    ) -> Attention:
        return RowAttention(self, slots_N, table_NP, ends_N)

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

    paged: TorchAttention
    layout: StepLayout

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        layout, scale, cache_HS2D = self.layout, self.paged.spec.scale, self.paged.layer_cache(layer)
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
        out_BHQD = with_sinks(q_BHQD, k_BHLD, v_BHLD, layout.mask_B1QL, scale, sinks_HQ)
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
        out_GHTD = with_sinks(q_GHTD, k_GHLD, v_GHLD, mask_TL, scale, sinks_H.view(Hkv, G).T[..., None])
    return out_GHTD.permute(2, 1, 0, 3).reshape(T, Hq, -1)


def with_sinks(
    q_XQD: Tensor, k_XLD: Tensor, v_XLD: Tensor, mask: Tensor, scale: float, sinks: Tensor
) -> Tensor:
    """As SDPA, where each query row [X, Q] has one more score, `sinks` (broadcast to [X, Q]), of value 0."""
    scores_XQL = (q_XQD @ k_XLD.transpose(-1, -2)).float() * scale + mask
    sinks_XQ1 = sinks.expand(scores_XQL.shape[:-1])[..., None]
    weights_XQL = torch.cat((scores_XQL, sinks_XQ1), dim=-1).softmax(dim=-1)[..., :-1]
    return weights_XQL.to(v_XLD.dtype) @ v_XLD
