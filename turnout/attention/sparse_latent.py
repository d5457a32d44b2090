"""Sparse latent attention (DSA) over pages of latent vectors and index keys, with torch: the reference.

As latent.py, but each token attends to the `index_topk` tokens that its index queries choose (indexing.py).
Index keys lie in the slots of the latent vectors, so that what happens to a page happens to both; in FP8
(--index-cache-dtype) with a scale each. Where no
token of a chunk sees more than `index_topk` the choice is everything, and the chunk is computed as latent.py
does. Beyond that each token reads the vectors it chose, in the absorbed form, SPARSE_ROWS tokens at a time.

On GPUs kernels score tokens and read what they chose (backends/triton/latent.py), but where index keys are
in FP8.

Layers without an indexer attend to what the last layer before them chose in this step.

Legend: N tokens of the step, M of them decoding, R some of them, H query heads, D/Dv sizes of keys and
values, Di of index keys, Lc of the latent vector, C what is kept of a token, L tokens of a context, K =
index_topk, S slots of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention.indexing import Fp8Keys, Index, index_scores, largest, places
from turnout.attention.interface import Attention, Chunk
from turnout.attention.kinds import CacheGroup, SparseLatentSpec
from turnout.attention.latent import LatentAttention
from turnout.attention.paged import to_device
from turnout.attention.torch import StepLayout, additive
from turnout.attention.up_projection import UpProjection
from turnout.attention.workspace import SPARSE_ROWS


@dataclass(frozen=True)
class Contexts:
    """Of tokens that may see more than `index_topk`. slots: int64, [L] of one context or [R, L] of each
    token's; ends: int64 [R], how many of them each sees."""

    slots: Tensor
    ends_R: Tensor


class SparseLatentAttention(LatentAttention):
    """Owns the latent and index pages of a group of layers; index keys of a layer are [S, Di]."""

    spec: SparseLatentSpec

    def __init__(self, group: CacheGroup, **rest: Any) -> None:
        super().__init__(group, **rest)
        assert isinstance(group.spec, SparseLatentSpec)
        self._indexed = {
            layer: i for i, layer in enumerate(x for x in group.layers if x not in group.sharing)
        }
        size = len(self._indexed), self.cache.shape[1], group.spec.index_dim
        dtype = torch.uint8 if group.spec.index_fp8 else self.dtype
        self.index_keys = torch.zeros(size, dtype=dtype, device=self.device)
        # Of each slot's key; none but in FP8.
        self.index_scales = torch.zeros(*size[:2] if group.spec.index_fp8 else (0, 0), device=self.device)

    @property
    def cache_bytes(self) -> int:
        return super().cache_bytes + self.index_keys.nbytes + self.index_scales.nbytes

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        layout = self._layout(decoding, chunks)
        return _LaidOut(self, layout, self._decoding(decoding), [self.chunk_contexts(c) for c in chunks])

    def _decoding(self, decoding: Sequence[Chunk]) -> Contexts | None:
        """None where no token sees more than `index_topk`."""
        if all(chunk.end <= self.spec.index_topk for chunk in decoding):
            return None
        ends_R = torch.tensor([i for c in decoding for i in range(c.start + 1, c.end + 1)])
        rows_R = torch.tensor([c.request.row for c in decoding for _ in range(c.length)])
        places_RL = torch.arange(int(ends_R.max())).expand(len(ends_R), -1)
        # Padding repeats a slot of the sequence: what another request left in a page is never read.
        places_RL = torch.where(places_RL < ends_R[:, None], places_RL, 0)
        slots_RL = self._single_slots(rows_R[:, None], places_RL)
        return Contexts(*to_device([slots_RL, ends_R], self.device))

    def chunk_contexts(self, chunk: Chunk) -> Contexts | None:
        """As `_decoding`, of a chunk."""
        if chunk.end <= self.spec.index_topk:
            return None
        slots_L = self._slots(chunk.request.row, 0, chunk.end)
        return Contexts(*to_device([slots_L, torch.arange(chunk.start + 1, chunk.end + 1)], self.device))

    def store_index(self, layer: int, slots_N: Tensor, key_ND: Tensor) -> Tensor | Fp8Keys:
        """The index keys [S, Di] of a layer, once they hold these."""
        i = self._indexed[layer]
        if not self.spec.index_fp8:
            return self.index_keys[i].index_copy_(0, slots_N, key_ND)
        keys = Fp8Keys(self.index_keys[i], self.index_scales[i])
        keys.store(slots_N, key_ND)
        return keys

    def choose(self, contexts: Contexts, keys_SD: Tensor | Fp8Keys, index: Index) -> Tensor:
        """int32 [R, K]: the slots that the tokens of `index` attend to, then -1."""
        parts = []
        for start in range(0, len(contexts.ends_R), SPARSE_ROWS):
            rows = slice(start, start + SPARSE_ROWS)
            ends_R1 = contexts.ends_R[rows, None]
            slots = contexts.slots if contexts.slots.dim() == 1 else contexts.slots[rows]
            scores_RL = index_scores(index.rows(rows), keys_SD[slots])
            seen_RL = torch.arange(scores_RL.shape[1], device=self.device) < ends_R1
            places_RK = places(largest(scores_RL, seen_RL, self.spec.index_topk), self.spec.index_topk)
            slots_RK = slots.expand(len(places_RK), -1).gather(1, places_RK.clamp(min=0))
            parts.append(torch.where(places_RK < 0, -1, slots_RK).int())
        return torch.cat(parts)

    def attend_chosen(self, chosen_RK: Tensor, cache_SC: Tensor, q_RHD: Tensor, up: UpProjection) -> Tensor:
        """[R, H, Dv] over the slots [R, K] that each token chose, itself or an earlier one first."""
        q_RHC, mixed = up.absorb(q_RHD), []
        for q, slots_RK in zip(q_RHC.split(SPARSE_ROWS), chosen_RK.split(SPARSE_ROWS), strict=True):
            held_RK = slots_RK >= 0
            kept_RKC = cache_SC[torch.where(held_RK, slots_RK, slots_RK[:, :1])]
            mixed.append(
                F.scaled_dot_product_attention(
                    q[:, None],
                    kept_RKC[:, None],
                    kept_RKC[:, None, :, : self.spec.latent_dim],
                    attn_mask=additive(held_RK, q.dtype)[:, None, None],
                    scale=self.spec.scale,
                )[:, 0]
            )
        return up.values(torch.cat(mixed))


@dataclass(frozen=True)
class _LaidOut(Attention):
    """Of a step, or one of its micro-batches. decoding, chunks: the contexts to choose from; None: everything
    is chosen. chosen: int32 [R, K] of each of these, by the last layer that chose."""

    paged: SparseLatentAttention
    layout: StepLayout
    decoding: Contexts | None
    chunks: Sequence[Contexts | None]
    chosen: dict[int, Tensor] = field(default_factory=dict)

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        paged, layout = self.paged, self.layout
        cache_SC = paged.store(layer, layout.write_N, latent_NC)
        if index is not None:
            self._choose(paged.store_index(layer, layout.write_N, index.key_ND), index)
        parts = []
        if M := layout.num_decoding:
            if self.decoding is None:
                parts.append(paged.attend_decoding(layout, cache_SC, q_NHD[:M], up))
            else:
                parts.append(paged.attend_chosen(self.chosen[0], cache_SC, q_NHD[:M], up))
        for i, chunk in enumerate(layout.chunks):
            q_THD = q_NHD[chunk.rows]
            if self.chunks[i] is None:
                parts.append(paged.attend_chunk(chunk, cache_SC, q_THD, latent_NC[chunk.rows], up))
            else:
                parts.append(paged.attend_chosen(self.chosen[i + 1], cache_SC, q_THD, up))
        return torch.cat(parts) if parts else q_NHD.new_empty(0, *up.values_size)

    def _choose(self, keys_SD: Tensor | Fp8Keys, index: Index) -> None:
        rows = [slice(0, self.layout.num_decoding), *(chunk.rows for chunk in self.layout.chunks)]
        for i, contexts in enumerate((self.decoding, *self.chunks)):
            if contexts is not None:
                self.chosen[i] = self.paged.choose(contexts, keys_SD, index.rows(rows[i]))
