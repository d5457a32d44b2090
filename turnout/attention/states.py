"""The states of running requests in a group of recurrent layers, in slots of fixed size.

A request has slots from its admission on: one for its state and, with drafts, one for the state behind each
of them. A step leaves a state in every slot that it has a token for; the scheduler exchanges the first slot
for that of the last draft that holds. A request that begins, at position 0, begins with zeros whatever its
slot held, NaN included; so a slot is cleared by being used again, and a preempted request, which is computed
again, needs nothing else.

Legend: N tokens of a step, B requests of one token each, X = `DeltaNetSpec.mixed`, C channels of the
convolution, W its width, Hv value heads, Dk/Dv sizes of key/value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from turnout.attention import delta_rule
from turnout.attention.capability import Chosen, Place
from turnout.attention.choose import choose_states
from turnout.attention.delta_rule import DeltaCell
from turnout.attention.interface import Attention, Chunk
from turnout.attention.kinds import DeltaNetSpec, StateGroup
from turnout.attention.paged import to_device
from turnout.registry import ATTENTION_BACKENDS, load

if TYPE_CHECKING:  # numba, which not every machine has
    from turnout.kernels.cpu.recurrent_layer import Requests


class RequestStates:
    """Owns the states of a group of layers. Computes them in torch; backends subclass it: see capability.py.

    windows: [layers, slots, W - 1, C] in the compute type; states: float32 [layers, slots, Hv, Dk, Dv]. Slots
    are those of requests, one for padding, then of snapshots.
    """

    def __init__(
        self,
        group: StateGroup,
        *,
        max_running: int,
        per_request: int = 1,
        snapshots: int = 0,
        device: torch.device,
        dtype: torch.dtype,
        takes_chunks: bool = False,
        prompts: StatePrompts | None = None,
        chosen: Chosen | None = None,
    ):
        """group: with the heads of this rank. per_request, snapshots: slots of a request and for these.
        takes_chunks: `recur` takes several tokens of a request. prompts: takes them instead, always or where
        `chosen` says so."""
        spec = group.spec
        self.most_in_parts = 0  # requests that `recur` takes parts of
        self.index = {layer: i for i, layer in enumerate(group.layers)}
        self.device, self.takes_chunks = device, takes_chunks
        self._prompts, self._chosen = prompts, chosen
        sizes = len(group.layers), max_running * per_request + 1 + snapshots
        self.windows = torch.zeros(*sizes, *window_size(spec), dtype=dtype, device=device)
        self.states = torch.zeros(*sizes, *state_size(spec), device=device)

    @property
    def state_bytes(self) -> int:
        return self.windows.nbytes + self.states.nbytes

    def copy_state(self, source: int, target: int) -> None:
        for kept in (self.windows, self.states):
            kept[:, target] = kept[:, source]

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        """Of a step: one token of each of `decoding` and its drafts, then `chunks`."""
        most = max((chunk.length for chunk in decoding), default=1)
        if most == 1 and self.takes_chunks and self._prompts is None:
            return self.together((*decoding, *chunks))
        rounds = tuple(self._round(depth, decoding) for depth in range(most))
        lengths, together = [chunk.length for chunk in chunks], None
        if self._prompts is not None and (self._chosen is None or self._chosen.takes_prompts(lengths)):
            together = self._prompts.laid_out(self, self.together(chunks), lengths) if chunks else None
        elif chunks and self.takes_chunks:
            together = self.together(chunks)
        return _LaidOut(self, rounds, sum(chunk.length for chunk in decoding), tuple(chunks), together)

    def together(self, chunks: Sequence[Chunk]) -> Rows:
        """All chunks in one call."""
        columns = [
            [chunk.request.state_slots[0] for chunk in chunks],
            [chunk.start for chunk in chunks],
        ]
        if any(chunk.length > 1 for chunk in chunks):
            columns.append(list(accumulate(chunk.length for chunk in chunks)))
        return Rows(self, *torch.tensor(columns, dtype=torch.int64, device=self.device))

    def _round(self, depth: int, decoding: Sequence[Chunk]) -> _Round:
        """The tokens that have `depth` of their chunk before them."""
        ends = accumulate(chunk.length for chunk in decoding)
        found = [
            (
                end - c.length + depth,
                c.request.state_slots[max(depth, 1) - 1],
                c.request.state_slots[depth],
                c.start,
            )
            for c, end in zip(decoding, ends, strict=True)
            if c.length > depth
        ]
        columns_4B = torch.tensor(found, dtype=torch.int64).reshape(-1, 4).T.contiguous()
        places_B, before_B, slots_B, starts_B = to_device([columns_4B], self.device)[0]
        return _Round(places_B, before_B, Rows(self, slots_B, starts_B + depth))

    def advance(self, layer: int, chunk: Chunk, mixed_TX: Tensor, cell: DeltaCell) -> Tensor:
        """The tokens of one chunk: [T, Hv Dv]."""
        i, slot = self.index[layer], chunk.request.state_slots[0]
        window_WC, state_HKV = self.windows[i, slot], self.states[i, slot]
        if chunk.start == 0:
            window_WC.zero_()
            state_HKV.zero_()
        return self.go_on(cell, mixed_TX, window_WC, state_HKV)

    def go_on(self, cell: DeltaCell, mixed_TX: Tensor, window_WC: Tensor, state_HKV: Tensor) -> Tensor:
        """As `delta_rule.advance`."""
        return delta_rule.advance(cell, mixed_TX, window_WC, state_HKV)

    def compiled(self, layer: int, rows: Rows) -> Requests | None:
        """See `Attention.compiled_states`."""
        return None

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell, rows: Rows) -> Tensor:
        """The tokens of `rows`: [N, Hv Dv]."""
        i, slots_B = self.index[layer], rows.slots_B
        begins_B111 = (rows.positions_B == 0)[:, None, None, None]
        windows_BWC = self.windows[i, slots_B].masked_fill_(begins_B111[..., 0], 0)
        states_BHKV = self.states[i, slots_B].masked_fill_(begins_B111, 0)
        y_BY = delta_rule.step(cell, mixed_NX, windows_BWC, states_BHKV)
        self.windows[i].index_copy_(0, slots_B, windows_BWC)
        self.states[i].index_copy_(0, slots_B, states_BHKV)
        return y_BY


def request_states(
    group: StateGroup, place: Place, *, device: torch.device, dtype: torch.dtype, **rest: Any
) -> RequestStates:
    """By the first backend that takes the group there. The rest: as of `RequestStates`."""
    chosen, kernels = choose_states(group.spec, place)
    rest |= {"device": device, "dtype": dtype, "takes_chunks": kernels.takes_chunks}
    if chosen.prompts != chosen.backend:
        library = ATTENTION_BACKENDS.get(chosen.prompts).implementations[group.spec.kind]
        rest |= {"prompts": load(library)(), "chosen": chosen}
    states: RequestStates = load(kernels.implementation)(group, **rest)
    return states


class StatePrompts(Protocol):
    """What takes prompts through recurrent layers in place of a backend's own kernels."""

    def laid_out(self, states: RequestStates, rows: Rows, lengths: Sequence[int]) -> Attention:
        """Of prompts of so many tokens. rows: their slots, starts and ends."""
        ...


@dataclass(frozen=True)
class Rows(Attention):
    """One token of each request. slots, positions: int64 [B], read on the device, so that a graph can
    capture it. ends: int64 [B], where the tokens of each request end, for a kernel that takes several; None:
    each has one."""

    of: RequestStates
    slots_B: Tensor
    positions_B: Tensor
    ends_B: Tensor | None = None

    def adds_parts(self, layer: int, rows: int) -> bool:
        return rows <= self.of.most_in_parts

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        return self.of.recur(layer, mixed_NX, cell, self)

    def compiled_states(self, layer: int) -> Requests | None:
        return self.of.compiled(layer, self)


class _Round(NamedTuple):
    """At most one token of each request. places, before: int64 [B], of each token among those of the step,
    and the slot of the state that it goes on from."""

    places_B: Tensor
    before_B: Tensor
    rows: Rows


@dataclass(frozen=True)
class _LaidOut(Attention):
    """Of a step, or one of its micro-batches. rounds: of the `num_decoding` first tokens. together: takes all
    chunks, if anything does."""

    of: RequestStates
    rounds: tuple[_Round, ...]
    num_decoding: int
    chunks: tuple[Chunk, ...]
    together: Attention | None

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        at = self.num_decoding
        parts = [self._decoded(layer, mixed_NX[:at], cell)] if at or not self.chunks else []
        if self.together is not None:
            parts.append(self.together.recur(layer, mixed_NX[at:], cell))
        for chunk in self.chunks if self.together is None else ():
            parts.append(self.of.advance(layer, chunk, mixed_NX[at : at + chunk.length], cell))
            at += chunk.length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decoded(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        if len(self.rounds) == 1:
            return self.rounds[0].rows.recur(layer, mixed_NX, cell)
        i, spec = self.of.index[layer], cell.spec
        y_NY = mixed_NX.new_empty(len(mixed_NX), spec.num_heads * spec.value_dim)
        for depth, (places_B, before_B, rows) in enumerate(self.rounds):
            if depth:
                for kept in (self.of.windows[i], self.of.states[i]):
                    kept.index_copy_(0, rows.slots_B, kept[before_B])
            y_NY[places_B] = rows.recur(layer, mixed_NX[places_B], cell)
        return y_NY


class SequenceStates(Attention):
    """Of one sequence, which is computed in consecutive parts; states are kept here, not in slots.

    By the kernel for CPUs where there is one: in torch's blocks prompts take ten times as long.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, int] = {}  # tokens of each layer

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        if layer not in self._kept:
            window_WC = mixed_NX.new_zeros(window_size(cell.spec))
            self._kept[layer] = window_WC, torch.zeros(state_size(cell.spec), device=mixed_NX.device)
        kept = self._kept[layer]
        before = self._seen.get(layer, 0)
        self._seen[layer] = before + len(mixed_NX)
        if not _on_cpu(cell.spec, mixed_NX.device.type, mixed_NX.dtype):
            return delta_rule.advance(cell, mixed_NX, *kept)
        from turnout.kernels.cpu.delta_rule import advance

        slots_1, positions_1, ends_1 = torch.tensor([[0], [before], [len(mixed_NX)]])
        windows_1WC, states_1HKV = (of_request[None] for of_request in kept)
        y_NY: Tensor = advance(
            mixed_NX, slots_1, positions_1, windows_1WC, states_1HKV, *cell.learned, ends_1
        )
        return y_NY


@cache
def _on_cpu(spec: DeltaNetSpec, device: str, dtype: torch.dtype) -> bool:
    """Whether the kernel for CPUs takes such a layer."""
    if device != "cpu" or dtype != torch.float32:
        return False
    return choose_states(spec, Place(device="cpu", dtype="float32", page_size=1))[0].backend == "cpu"


def window_size(spec: DeltaNetSpec) -> tuple[int, int]:
    """[W - 1, C]"""
    return spec.conv_width - 1, spec.channels


def state_size(spec: DeltaNetSpec) -> tuple[int, int, int]:
    """[Hv, Dk, Dv]"""
    return spec.num_heads, spec.head_dim, spec.value_dim
