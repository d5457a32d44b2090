"""Compressed attention (DeepSeek-V4), with torch alone: the last tokens, and entries made of whole windows.

    entry w = turn(norm(sum_t softmax_t(gate) * content), position w * rate),  t over the tokens of window w

channel by channel. With overlap each token has two series of channels: the first is for the entry of the
next window, the second for that of its own, so that an entry is made of twice as many vectors. A token at
position t sees entry w if window w ends at t or before it: w < (t + 1) // rate. With an index, which has
entries of its own, it sees the `index_topk` of those whose score

    sum over heads h of weight_h * max(0, query_h . entry)

is largest, ties going to the lowest place. The last tokens are in a ring by position; so are contents and
gates of those whose entries are not made yet. Both belong to the state slot of a request: what an earlier
request left there is never read, since nothing before position 0 is. Rings are longer than what is read of
them by the drafts of a step, so that drafts overwrite nothing that is needed if they are rejected; an entry
made of rejected drafts is made anew when its window ends again, before any token sees it.

Legend: N tokens of a step, T of a chunk, R of a block of it, Hq query heads, D head size, Hi/Di number and
size of index heads, Y = D + Di channels of an entry, X of what is kept of a token until its entries are made,
E entries of a context, P places of a ring or tokens that were kept there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnout.attention.entries import Compressible
from turnout.attention.interface import Attention, Chunk
from turnout.attention.kinds import CacheGroup, CompressedSpec
from turnout.attention.paged import to_device
from turnout.attention.torch import TorchAttention, additive, attend_chunk
from turnout.attention.workspace import compressed_rows


def attend(
    spec: CompressedSpec,
    q_THD: Tensor,
    start: int,
    recent_LD: Tensor,
    entries_EY: Tensor,
    sinks_H: Tensor,
    choose: Callable[[slice, Tensor, Tensor], Tensor],
) -> Tensor:
    """[T, Hq, D] of tokens at start, start + 1, ...; recent: the last L tokens up to the last of these.

    choose(rows, entries, seen): as `Compressible.choose`, of rows of these T.
    """
    T, L, E = len(q_THD), len(recent_LD), len(entries_EY)
    device, parts, most = q_THD.device, [], compressed_rows(spec, E)
    for at in range(0, T, most):
        rows = slice(at, min(at + most, T))
        own_R1 = torch.arange(start + rows.start, start + rows.stop, device=device)[:, None]
        low, high = max(0, L - T + rows.start - spec.recent + 1), L - T + rows.stop
        ages_RL = own_R1 - torch.arange(start + T - L + low, start + T - L + high, device=device)
        seen_RL = (ages_RL >= 0) & (ages_RL < spec.recent)
        keys_LD = recent_LD[low:high]
        if E:
            ready_RE = torch.arange(E, device=device) < (own_R1 + 1) // spec.rate
            seen_RL = torch.cat((seen_RL, choose(rows, entries_EY, ready_RE)), dim=1)
            keys_LD = torch.cat((keys_LD, entries_EY[:, : spec.head_dim]))
        mask_RL = additive(seen_RL, q_THD.dtype)
        parts.append(attend_chunk(q_THD[rows], keys_LD[None], keys_LD[None], mask_RL, spec.scale, sinks_H))
    return torch.cat(parts) if parts else q_THD


class CompressedAttention(TorchAttention):
    """Owns entries [layers, S, D + Di] in pages of a group of layers, and of each state slot the last tokens
    [layers, slots, recent + drafts, D] and contents and gates [layers, slots, remembered + drafts, X]. Slots
    are those of requests, one spare, then of snapshots."""

    spec: CompressedSpec

    def __init__(
        self, group: CacheGroup, *, max_running: int, drafts: int = 0, snapshots: int = 0, **rest: Any
    ) -> None:
        """drafts: the most that a step verifies of a request. snapshots: slots for these."""
        super().__init__(group, max_running=max_running, **rest)
        self._recent, self._open = (
            torch.zeros(
                len(group.layers), max_running + 1 + snapshots, *size, dtype=self.dtype, device=self.device
            )
            for size in self.spec.ring_sizes(drafts)
        )

    def _layer_size(self, slots: int) -> tuple[int, ...]:
        entries = slots // self.page_size * self.spec.entries_per_page(self.page_size)
        return entries, self.spec.head_dim + self.spec.index_dim

    @property
    def state_bytes(self) -> int:
        return self._recent.nbytes + self._open.nbytes

    def copy_state(self, source: int, target: int) -> None:
        for ring in (self._recent, self._open):
            ring[:, target] = ring[:, source]

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        every, parts, at = [*decoding, *chunks], [], 0
        slots = to_device([self._entry_slots(chunk) for chunk in every], self.device) if every else []
        for chunk, slots_E in zip(every, slots, strict=True):
            parts.append(self._part(chunk, at, slots_E))
            at += chunk.length
        return _LaidOut(self, tuple(parts))

    def _entry_slots(self, chunk: Chunk) -> Tensor:
        """On the host: of all entries of the context [E]."""
        self._place(chunk.request)
        spec, per = self.spec, self.spec.entries_per_page(self.page_size)
        windows_E = torch.arange(chunk.end // spec.rate if spec.rate else 0)
        last_E = (windows_E + 1) * spec.rate - 1
        pages_E = self.host_table[chunk.request.row, last_E // self.page_size]
        return pages_E * per + (windows_E % per if per else 0)

    def _part(self, chunk: Chunk, at: int, slots_E: Tensor) -> _Part:
        spec, device = self.spec, self.device
        recent, remembered = self._recent.shape[2], self._open.shape[2]
        first = chunk.start // spec.rate if spec.rate else 0
        needed = max(0, first - spec.overlap) * spec.rate if spec.rate else chunk.start
        return _Part(
            rows=slice(at, at + chunk.length),
            slot=chunk.request.state_slots[0],
            start=chunk.start,
            end=chunk.end,
            recent_P=_ring(max(0, chunk.start - spec.recent + 1), chunk.start, recent, device),
            open_P=_ring(needed, chunk.start, remembered, device),
            store_recent_P=_ring(max(chunk.start, chunk.end - recent), chunk.end, recent, device),
            store_open_P=_ring(max(chunk.start, chunk.end - remembered), chunk.end, remembered, device),
            first=first,
            slots_E=slots_E,
        )

    def attend_part(
        self,
        part: _Part,
        layer: int,
        q_THD: Tensor,
        kv_TD: Tensor,
        sinks_H: Tensor,
        rest: Compressible | None,
    ) -> Tensor:
        """[T, Hq, D] of one chunk, whose tokens are then among what is kept."""
        i, spec = self.index[layer], self.spec
        ring_WD = self._recent[i, part.slot]
        recent_LD = torch.cat((ring_WD[part.recent_P], kv_TD))
        ring_WD[part.store_recent_P] = kv_TD[len(kv_TD) - len(part.store_recent_P) :]
        entries_SY = self.layer_cache(layer)
        if rest is not None:
            self._compress(part, self._open[i, part.slot], entries_SY, rest)
        entries_EY = entries_SY[part.slots_E]

        def choose(rows: slice, entries_EY: Tensor, seen_RE: Tensor) -> Tensor:
            if rest is None:
                return seen_RE
            at = part.rows.start
            return rest.choose(slice(at + rows.start, at + rows.stop), entries_EY, seen_RE)

        return attend(spec, q_THD, part.start, recent_LD, entries_EY, sinks_H, choose)

    def _compress(self, part: _Part, ring_WX: Tensor, entries_SY: Tensor, rest: Compressible) -> None:
        """Store the entries of the windows that end in this part, and what the next ones are made of."""
        raw_TX, rate = rest.raw_NX[part.rows], self.spec.rate
        count = len(part.slots_E) - part.first
        if count:
            raw_PX = torch.cat((ring_WX[part.open_P], raw_TX))
            whole = len(raw_PX) - part.end % rate  # of the last window, which is not complete
            entries_SY[part.slots_E[part.first :]] = rest.made(raw_PX[:whole], part.first, count)
        ring_WX[part.store_open_P] = raw_TX[len(raw_TX) - len(part.store_open_P) :]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One chunk of a step. Of rings: places that are read, before it, and written. first: the first window
    that may end in it. slots_E: of all entries of the context."""

    rows: slice
    slot: int
    start: int
    end: int
    recent_P: Tensor
    open_P: Tensor
    store_recent_P: Tensor
    store_open_P: Tensor
    first: int
    slots_E: Tensor


def _ring(start: int, end: int, size: int, device: torch.device) -> Tensor:
    """Places of positions [start, end) in a ring of so many."""
    return torch.arange(start, end if size else start, device=device) % max(size, 1)


@dataclass(frozen=True)
class _LaidOut(Attention):
    """Of a step, or one of its micro-batches."""

    paged: CompressedAttention
    parts: tuple[_Part, ...]

    def compressed(
        self, layer: int, q_NHD: Tensor, kv_ND: Tensor, sinks_H: Tensor, rest: Compressible | None
    ) -> Tensor:
        outs = [
            self.paged.attend_part(part, layer, q_NHD[part.rows], kv_ND[part.rows], sinks_H, rest)
            for part in self.parts
        ]
        return torch.cat(outs) if outs else q_NHD


class WholeCompressed:
    """Of one sequence that comes in consecutive parts: every token and entry is kept. The reference."""

    def __init__(self, spec: CompressedSpec):
        self._spec = spec
        self._kv: list[Tensor] = []
        self._raw: list[Tensor] = []

    def attend(self, q_THD: Tensor, kv_TD: Tensor, sinks_H: Tensor, rest: Compressible | None) -> Tensor:
        self._kv.append(kv_TD)
        kv_LD, spec = torch.cat(self._kv), self._spec
        if rest is None:
            no_entries = kv_TD.new_empty(0, spec.head_dim)
            return attend(
                spec, q_THD, len(kv_LD) - len(q_THD), kv_LD, no_entries, sinks_H, lambda _, __, seen: seen
            )
        self._raw.append(rest.raw_NX)
        count = len(kv_LD) // spec.rate
        entries_EY = kv_TD.new_empty(0, spec.head_dim)
        if count:
            entries_EY = rest.made(torch.cat(self._raw)[: count * spec.rate], 0, count)
        return attend(spec, q_THD, len(kv_LD) - len(q_THD), kv_LD, entries_EY, sinks_H, rest.choose)
