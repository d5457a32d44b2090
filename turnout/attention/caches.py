"""The caches of all layers of a model, one for each cache group, and attention that finds a layer's.

Recurrent layers have states in place of a cache (states.py).

Legend: N tokens of a step, Hq/Hkv query/KV heads, D head size, C what latent attention keeps of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnout.attention.delta_rule import DeltaCell
from turnout.attention.entries import Compressible
from turnout.attention.indexing import Index
from turnout.attention.interface import Attention, Chunk, ProjectedHeads
from turnout.attention.paged import PagedAttention
from turnout.attention.states import RequestStates
from turnout.attention.up_projection import UpProjection

if TYPE_CHECKING:  # numba, which not every machine has
    from turnout.kernels.cpu.attention import Cache, Chunks
    from turnout.kernels.cpu.recurrent_layer import Requests


class AttentionCaches:
    """groups: the paged attention of each cache group, by its number; states: of each group of recurrent
    layers. All are on one device, in one type."""

    def __init__(self, groups: Sequence[PagedAttention], states: Sequence[RequestStates] = ()):
        self.groups, self.states = tuple(groups), tuple(states)
        layers = *(group.index for group in self.groups), *(states.index for states in self.states)
        self._numbers = {layer: number for number, index in enumerate(layers) for layer in index}

    @property
    def device(self) -> torch.device:
        return self.groups[0].device

    @property
    def cache_bytes(self) -> int:
        return sum(group.cache_bytes for group in self.groups)

    @property
    def state_bytes(self) -> int:
        of_groups = sum(group.state_bytes for group in self.groups)
        return of_groups + sum(states.state_bytes for states in self.states)

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """States in all layers that have some, (from, to) slots, one after the other."""
        keepers: list[PagedAttention | RequestStates] = [*self.groups, *self.states]
        for keeper in keepers:
            for source, target in copies:
                keeper.copy_state(source, target)

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        """As `PagedAttention.laid_out`, for all layers."""
        return self.together(
            [group.laid_out(decoding, chunks) for group in self.groups],
            [states.laid_out(decoding, chunks) for states in self.states],
        )

    def together(self, attentions: Sequence[Attention], recurrent: Sequence[Attention] = ()) -> Attention:
        """One attention made of those of the groups, by number, and of the groups of recurrent layers."""
        every = *attentions, *recurrent
        return every[0] if len(every) == 1 else _ByLayer(self._numbers, every)


class _ByLayer(Attention):
    """numbers: which of `attentions` is a layer's."""

    def __init__(self, numbers: dict[int, int], attentions: Sequence[Attention]):
        self._numbers, self._attentions = numbers, attentions
        self.places_N = attentions[0].places_N

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        return self._attentions[self._numbers[layer]](layer, q_NHD, k_NHD, v_NHD, sinks_H)

    def place(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self._attentions[self._numbers[layer]].place(layer)

    def attend(
        self, layer: int, q_NHD: Tensor, sinks_H: Tensor | None = None, out_NHD: Tensor | None = None
    ) -> Tensor:
        return self._attentions[self._numbers[layer]].attend(layer, q_NHD, sinks_H, out_NHD)

    def attend_projected(
        self, layer: int, projected: ProjectedHeads, sinks_H: Tensor | None = None
    ) -> Tensor | None:
        return self._attentions[self._numbers[layer]].attend_projected(layer, projected, sinks_H)

    def compiled(self, layer: int) -> tuple[Chunks, Cache] | None:
        return self._attentions[self._numbers[layer]].compiled(layer)

    def compiled_states(self, layer: int) -> Requests | None:
        return self._attentions[self._numbers[layer]].compiled_states(layer)

    def adds_parts(self, layer: int, rows: int) -> bool:
        return self._attentions[self._numbers[layer]].adds_parts(layer, rows)

    def recur(self, layer: int, mixed_NX: Tensor, cell: DeltaCell) -> Tensor:
        return self._attentions[self._numbers[layer]].recur(layer, mixed_NX, cell)

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        return self._attentions[self._numbers[layer]].latent(layer, q_NHD, latent_NC, up, index)

    def compressed(
        self, layer: int, q_NHD: Tensor, kv_ND: Tensor, sinks_H: Tensor, rest: Compressible | None
    ) -> Tensor:
        return self._attentions[self._numbers[layer]].compressed(layer, q_NHD, kv_ND, sinks_H, rest)
