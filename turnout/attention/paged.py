"""The paged cache of a group of layers, with its page table: what all attention backends have in common.

A slot holds keys and values of one token, layer and head, [2, D]: gathered contexts then lie head by head,
which on a CPU is worth a third of the time from 400 tokens on (a token's heads side by side put neighbouring
tokens a power of two apart, in the same few cache sets).

Legend: N tokens of the step, B sequences, L context, P pages of a row of the table, S slots of the cache
(pages * page size), Hkv KV heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from turnout.attention.capability import Chosen, Place
from turnout.attention.choose import choose
from turnout.attention.interface import Attention, Chunk, PagedSequence
from turnout.attention.kinds import CacheGroup, keeps_states
from turnout.parallel.hardware import multiprocessors
from turnout.registry import ATTENTION_BACKENDS, load
from turnout.vocabulary import ComputeDtype, Device

ALIGNED = 64  # bytes, as torch's own memory is


class PagedAttention:
    """Owns the KV cache and the page table of a group of layers. Backends subclass it: see capability.py."""

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
        drafts: int = 0,
        chosen: Chosen | None = None,
    ):
        """group: its heads are those of this rank. number: of the group in `PagedSequence.kv`. chosen: names
        what computes long prompts, if that is not this. fixed_spans: into so many are contexts cut by kernels
        that cut them; 0: what suits a batch. drafts: the most that a step verifies of a request.
        """
        self.number, self.chosen = number, chosen
        self.spec = spec = group.spec
        self.index = {layer: i for i, layer in enumerate(group.layers)}  # of the model's layers in the cache
        self.page_size, self.fixed_spans, self.drafts = page_size, fixed_spans, drafts
        self.device, self.dtype = device, dtype
        self.processors = 1
        if device.type == "cuda":
            self.processors = multiprocessors(device)
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
        self.host_table = torch.zeros(max_running, self._pages_per_row, dtype=torch.int64)
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
        """Slots that the tokens of chunks write to, each in a row of its own. `table` then has the pages of
        their contexts but for those of these tokens, which whoever writes to the slots adds."""
        slots, behind = [], []
        copied, size = self._copied, self.page_size
        for chunk in chunks:
            request = chunk.request
            held = request.kv[self.number]
            row, pages = request.row, held.pages
            if held.placed < len(pages):
                self._place(request)
            for place in range(chunk.start, chunk.end):
                page = place // size
                if page >= copied[row]:
                    if page > copied[row]:
                        behind.append(row)
                    copied[row] = page + 1
                slots.append(pages[page] * size + place % size)
        if behind:
            rows, pages_BP = to_device([torch.tensor(behind), self.host_table[behind]], self.device)
            self.table.index_copy_(0, rows, pages_BP)
        return slots

    def place_rows(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """On the host: places [N] of the tokens of `chunks` in their sequences, slots [N] that they write to,
        pages [B, P] of each chunk's context, and which chunk is each token's [N]."""
        for chunk in chunks:
            self._place(chunk.request)
        # By numpy: torch takes the host three times as long for so little, while the GPU has nothing to do.
        rows_B, starts_B, ends_B = np.array(
            [[c.request.row for c in chunks], [c.start for c in chunks], [c.end for c in chunks]],
            dtype=np.int64,
        )
        lengths_B = ends_B - starts_B
        owners_N = np.repeat(np.arange(len(chunks)), lengths_B)
        firsts_B = lengths_B.cumsum() - lengths_B
        places_N = np.arange(len(owners_N)) + (starts_B - firsts_B)[owners_N]
        table = self.host_table.numpy()
        slots_N = _slots_at(table, rows_B[owners_N], places_N, self.page_size)
        table_BP = table[rows_B, : -(-int(ends_B.max(initial=0)) // self.page_size)]
        as_tensor = torch.from_numpy
        return as_tensor(places_N), as_tensor(slots_N), as_tensor(table_BP), as_tensor(owners_N)

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        """The attention of a step, or of one of its micro-batches: tokens of `decoding`, one each and perhaps
        drafts, then of `chunks`."""
        raise NotImplementedError

    def rows(
        self, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor, states_N: Tensor | None = None
    ) -> Attention:
        """The attention of one token per row, for CUDA graphs and --deterministic on CUDA: everything is
        int64 and read on the device. table: the pages of contexts; ends: their tokens, 0 in rows of padding,
        which attend to nothing. states: slots of what is kept of requests next to pages."""
        raise NotImplementedError

    def spans(self, rows: int, context: int) -> int:
        """Into how many parts kernels that decode `rows` tokens cut contexts of up to `context` tokens, each
        for a program of its own; 1 where they do not, or cut by something else."""
        return 1

    def _place(self, request: PagedSequence) -> None:
        """Bring the page table up to date with the pages of `request`."""
        held = request.kv[self.number]
        if held.placed < len(held.pages):
            self._copied[request.row] = min(self._copied[request.row], held.placed)
            fresh = held.pages[held.placed :]
            self.host_table.numpy()[request.row, held.placed : len(held.pages)] = fresh
            held.placed = len(held.pages)

    def _single_slots(self, rows_B: Tensor, places_B: Tensor) -> Tensor:
        return _slots_at(self.host_table, rows_B, places_B, self.page_size)

    def _slots(self, row: int, start: int, end: int) -> Tensor:
        return _slots_at(self.host_table, row, torch.arange(start, end), self.page_size)


def paged_attention(
    group: CacheGroup,
    *,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
    chosen: Chosen | None = None,
    snapshots: int = 0,
    **rest: Any,
) -> PagedAttention:
    """By the backend that was chosen for the group, or else by the first that takes it here.

    Arguments are those of `PagedAttention`, and, where a state is kept of each request, snapshots: slots for
    these. Raises ValueError where no backend takes it.
    """
    chosen = chosen or choose(group.spec, place_of(device, dtype, page_size))
    if chosen is None:
        raise ValueError(f"no attention backend takes {group.spec} on {device} in {dtype}")
    if keeps_states([group.spec]):
        rest["snapshots"] = snapshots
    make = load(ATTENTION_BACKENDS.get(chosen.backend).implementations[group.spec.kind])
    paged: PagedAttention = make(
        group, page_size=page_size, device=device, dtype=dtype, chosen=chosen, **rest
    )
    return paged


def place_of(device: torch.device, dtype: torch.dtype, page_size: int) -> Place:
    """`Place` of tensors: devices and dtypes of torch under the names that plans have for them."""
    name = cast(ComputeDtype, str(dtype).removeprefix("torch."))
    return Place(device=cast(Device, device.type), dtype=name, page_size=page_size)


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host int64 tensors on `device`, in one transfer rather than one each."""
    if device.type == "cpu":
        return list(tensors)
    return unpacked(pack_together(tensors, pinned=True).to(device, non_blocking=True), tensors)


def pack_together(tensors: Sequence[Tensor], *, pinned: bool = False) -> Tensor:
    """int64 tensors one behind the other, each from a multiple of 16 bytes on: Triton compiles a kernel again
    for a pointer that is none. pinned: in memory that a device copies from without the host."""
    packed = torch.empty(sum(_room(tensor) for tensor in tensors), dtype=torch.int64, pin_memory=pinned)
    into, at = packed.numpy(), 0
    for tensor in tensors:
        end = at + tensor.numel()
        into[at:end] = tensor.numpy().reshape(-1)
        at += _room(tensor)
        into[end:at] = 0
    return packed


def unpacked(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of what `pack_together` made of tensors with these shapes."""
    views, at = [], 0
    for tensor in tensors:
        views.append(packed[at : at + tensor.numel()].view(tensor.shape))
        at += _room(tensor)
    return views


def _slots_at(table: Any, rows: Any, places: Any, page_size: int) -> Any:
    """Of places in sequences whose pages stand in these rows of `table`; all of torch, or all of numpy."""
    return table[rows, places // page_size] * page_size + places % page_size


def _room(tensor: Tensor) -> int:
    """Places that it takes among others: an even number."""
    return tensor.numel() + tensor.numel() % 2


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros, but on a CPU memory is taken where it is first written, and not at once."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    count = math.prod(size) * dtype.itemsize
    bytes_B = torch.from_numpy(np.zeros(count + ALIGNED, dtype=np.uint8))
    start = -bytes_B.data_ptr() % ALIGNED
    return bytes_B[start : start + count].view(dtype).view(size)
