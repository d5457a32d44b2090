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
made of rejected drafts is overwritten when its window ends again, before any token sees it.

Sequences with one token in a step are computed together, those of similar length in a block, but for making
entries: a step of 32 requests on a CPU would spend most of its time between small calls of torch.

Legend: N tokens of a step, B of them in a block of single ones, T of a chunk, R of a block of it, Hq query
heads, D head size, Hi/Di number and size of index heads, Y = D + Di channels of an entry, X of what is kept
of a token until its entries are made, E entries of a context, P places of a ring or tokens that were kept
there.
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
from turnout.attention.torch import TorchAttention, additive, attend_chunk, with_sinks
from turnout.attention.workspace import compressed_contexts, compressed_rows


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
        """snapshots: slots for these. The others are those of `PagedAttention`."""
        super().__init__(group, max_running=max_running, drafts=drafts, **rest)
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

    def layer_state(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of a layer: the rings of all slots, of last tokens and of contents and gates, and its entries."""
        i = self.index[layer]
        return self._recent[i], self._open[i], self.layer_cache(layer)

    def copy_state(self, source: int, target: int) -> None:
        for ring in (self._recent, self._open):
            ring[:, target] = ring[:, source]

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        starts, at = [], 0
        for chunk in (*decoding, *chunks):
            self._place(chunk.request)
            starts.append((at, chunk))
            at += chunk.length
        alike = self._alike([(at, chunk) for at, chunk in starts if chunk.length == 1])
        blocks = [self._block(singles) for singles in alike if len(singles) > 1]
        alone = [singles[0] for singles in alike if len(singles) == 1]
        alone += [(at, chunk) for at, chunk in starts if chunk.length > 1]
        windows = [torch.arange(self.spec.entries(chunk.end)) for _, chunk in alone]
        slots = [
            self._entry_slots(torch.tensor(chunk.request.row), windows_E)
            for (_, chunk), windows_E in zip(alone, windows, strict=True)
        ]
        slots = to_device(slots, self.device) if slots else []
        parts = [self._part(chunk, at, slots_E) for (at, chunk), slots_E in zip(alone, slots, strict=True)]
        return _LaidOut(self, tuple(parts), tuple(blocks))

    def _entry_slots(self, rows: Tensor, windows: Tensor) -> Tensor:
        """On the host: of the entries of windows of sequences in these rows of the table."""
        per = self.spec.entries_per_page(self.page_size)
        last = (windows + 1) * self.spec.rate - 1
        return self.host_table[rows, last // self.page_size] * per + windows % max(per, 1)

    def _alike(self, singles: list[tuple[int, Chunk]]) -> list[list[tuple[int, Chunk]]]:
        """In blocks that padding makes about twice as large at most; none has contexts with entries and
        contexts without."""
        blocks: list[list[tuple[int, Chunk]]] = []
        most = 0
        for at, chunk in sorted(singles, key=lambda single: single[1].end):
            E = self.spec.entries(chunk.end)
            if most < E or not blocks or len(blocks[-1]) >= compressed_contexts(self.spec, E):
                blocks.append([])
                most = 2 * E + self.spec.recent if E else 0
            blocks[-1].append((at, chunk))
        return blocks

    def _block(self, singles: list[tuple[int, Chunk]]) -> _Block:
        """Padding repeats a place or an entry of the sequence: whatever is in others is never read."""
        spec, rate = self.spec, self.spec.rate
        rows_B, table_B, slots_B, own_B = torch.tensor(
            [[at, c.request.row, c.request.state_slots[0], c.start] for at, c in singles]
        ).T
        longest = singles[-1][1].end
        places_BP = own_B[:, None] - torch.arange(min(spec.recent, longest)).flip(0)
        seen_BP = places_BP >= 0
        places_BP = torch.where(seen_BP, places_BP, own_B[:, None])
        windows_E = torch.arange(spec.entries(longest))
        ready_BE = (windows_E + 1) * rate <= own_B[:, None] + 1
        slots_BE = self._entry_slots(table_B[:, None], torch.where(ready_BE, windows_E, 0))
        rows_B, slots_B, own_B, places_BP, seen_BX, slots_BE = to_device(
            [rows_B, slots_B, own_B, places_BP, torch.cat((seen_BP, ready_BE), dim=1).long(), slots_BE],
            self.device,
        )
        return _Block(
            rows_B=rows_B,
            slots_B=slots_B,
            recent_BP=places_BP % self._recent.shape[2],
            store_recent_B=own_B % self._recent.shape[2],
            store_open_B=own_B % max(self._open.shape[2], 1),
            seen_BX=seen_BX > 0,
            slots_BE=slots_BE,
            ending=tuple(
                self._part(chunk, at, slots_E[: spec.entries(chunk.end)])
                for (at, chunk), slots_E in zip(singles, slots_BE, strict=True)
                if rate and chunk.end % rate == 0
            ),
        )

    def _part(self, chunk: Chunk, at: int, slots_E: Tensor) -> Part:
        spec, device = self.spec, self.device
        recent, remembered = self._recent.shape[2], self._open.shape[2]
        first = chunk.start // spec.rate if spec.rate else 0
        needed = max(0, first - spec.overlap) * spec.rate if spec.rate else chunk.start
        return Part(
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
        part: Part,
        layer: int,
        q_THD: Tensor,
        kv_TD: Tensor,
        sinks_H: Tensor,
        rest: Compressible | None,
    ) -> Tensor:
        """[T, Hq, D] of one chunk, whose tokens are then among what is kept."""
        spec, recent_LD = self.spec, self.keep_part(part, layer, kv_TD, rest)
        entries_EY = self.layer_cache(layer)[part.slots_E]

        def choose(rows: slice, entries_EY: Tensor, seen_RE: Tensor) -> Tensor:
            if rest is None:
                return seen_RE
            at = part.rows.start
            return rest.choose(slice(at + rows.start, at + rows.stop), entries_EY, seen_RE)

        return attend(spec, q_THD, part.start, recent_LD, entries_EY, sinks_H, choose)

    def keep_part(self, part: Part, layer: int, kv_TD: Tensor, rest: Compressible | None) -> Tensor:
        """[L, D]: the last tokens up to the last of these, which are then among what is kept."""
        i = self.index[layer]
        ring_WD = self._recent[i, part.slot]
        recent_LD = torch.cat((ring_WD[part.recent_P], kv_TD))
        ring_WD[part.store_recent_P] = kv_TD[len(kv_TD) - len(part.store_recent_P) :]
        if rest is not None:
            self._compress(part, self._open[i, part.slot], self.layer_cache(layer), rest)
        return recent_LD

    def attend_block(
        self,
        block: _Block,
        layer: int,
        q_NHD: Tensor,
        kv_ND: Tensor,
        sinks_H: Tensor,
        rest: Compressible | None,
    ) -> Tensor:
        """[B, Hq, D], as `attend_part` of each; q, kv and rest: of the step."""
        i, spec, rows_B, slots_B = self.index[layer], self.spec, block.rows_B, block.slots_B
        rings_SWD, seen_BX = self._recent[i], block.seen_BX
        rings_SWD[slots_B, block.store_recent_B] = kv_ND[rows_B]
        keys_BXD = rings_SWD[slots_B[:, None], block.recent_BP]
        if rest is not None:
            self._open[i, slots_B, block.store_open_B] = rest.raw_NX[rows_B]
            entries_SY = self.layer_cache(layer)
            for part in block.ending:
                self._compress(part, self._open[i, part.slot], entries_SY, rest)
            entries_BEY = entries_SY[block.slots_BE]
            seen_BP, ready_BE = seen_BX.split([keys_BXD.shape[1], entries_BEY.shape[1]], dim=1)
            seen_BX = torch.cat((seen_BP, rest.choose(rows_B, entries_BEY, ready_BE)), dim=1)
            keys_BXD = torch.cat((keys_BXD, entries_BEY[..., : spec.head_dim]), dim=1)
        mask_B1X = additive(seen_BX, q_NHD.dtype)[:, None]
        return with_sinks(q_NHD[rows_B], keys_BXD, keys_BXD, mask_B1X, spec.scale, sinks_H)

    def _compress(self, part: Part, ring_WX: Tensor, entries_SY: Tensor, rest: Compressible) -> None:
        """Store the entries of the windows that end in this part, and what the next ones are made of."""
        raw_TX, rate = rest.raw_NX[part.rows], self.spec.rate
        count = len(part.slots_E) - part.first
        if count:
            raw_PX = torch.cat((ring_WX[part.open_P], raw_TX))
            whole = len(raw_PX) - part.end % rate  # of the last window, which is not complete
            entries_SY[part.slots_E[part.first :]] = rest.made(raw_PX[:whole], part.first, count)
        ring_WX[part.store_open_P] = raw_TX[len(raw_TX) - len(part.store_open_P) :]


@dataclass(frozen=True, kw_only=True)
class Part:
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


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Sequences of one token each. rows: of the step; slots: of states. Of rings: places that are read, with
    the token itself, and written. seen: of the last tokens, then of entries. ending: those whose token ends a
    window."""

    rows_B: Tensor
    slots_B: Tensor
    recent_BP: Tensor
    store_recent_B: Tensor
    store_open_B: Tensor
    seen_BX: Tensor
    slots_BE: Tensor
    ending: tuple[Part, ...]


def _ring(start: int, end: int, size: int, device: torch.device) -> Tensor:
    """Places of positions [start, end) in a ring of so many."""
    return torch.arange(start, end if size else start, device=device) % max(size, 1)


@dataclass(frozen=True)
class _LaidOut(Attention):
    """Of a step, or one of its micro-batches."""

    paged: CompressedAttention
    parts: tuple[Part, ...]
    blocks: tuple[_Block, ...]

    def compressed(
        self, layer: int, q_NHD: Tensor, kv_ND: Tensor, sinks_H: Tensor, rest: Compressible | None
    ) -> Tensor:
        paged, out_NHD = self.paged, torch.empty_like(q_NHD)
        for block in self.blocks:
            out_NHD[block.rows_B] = paged.attend_block(block, layer, q_NHD, kv_ND, sinks_H, rest)
        for part in self.parts:
            rows = part.rows
            out_NHD[rows] = paged.attend_part(part, layer, q_NHD[rows], kv_ND[rows], sinks_H, rest)
        return out_NHD


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
