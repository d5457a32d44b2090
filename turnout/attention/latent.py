"""Latent attention (MLA) over pages of latent vectors, with torch: the reference, in two equal forms.

A slot keeps [Lc | Dr] of a token: its normed latent vector, then the rotated part of its keys, which all
heads share. With the matrices of `UpProjection`, head by head, keys are [c up_k | rope] and values c up_v.

* Expanded: keys and values of every head are made, and attended to as any others. For long chunks, whose own
  tokens and earlier ones are expanded SPAN tokens at a time; the results of spans are joined by their
  log-sum-exp, so that memory does not grow with the context (`workspace_bytes`).
* Absorbed: queries are multiplied by up_k instead, and what is read of the latent vectors by up_v. Each token
  of the context is then one key [Lc | Dr] for all heads, whose first Lc are its value. For decoding, and for
  chunks so short that expanding what precedes them would cost more.

Legend: N tokens of the step, M of them decoding, T tokens of a chunk, L tokens of a context, H query heads,
Dn/Dr sizes of a key's part made from the latent vector and of its rotated part, D = Dn + Dr, Dv of a value,
Lc of the latent vector, C = Lc + Dr, S slots of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from turnout.attention.indexing import Index
from turnout.attention.interface import Attention, Chunk
from turnout.attention.kinds import AttentionSpec
from turnout.attention.paged import to_device
from turnout.attention.torch import ChunkLayout, StepLayout, TorchAttention, attend_chunk, attend_decoding
from turnout.attention.up_projection import UpProjection
from turnout.attention.workspace import LATENT_SPAN
from turnout.registry import ATTENTION_BACKENDS, load


class Attend(Protocol):
    """([H, T, Dv], float32 log-sum-exp [H, T]) of queries [H, T, D] over keys and values; see `attend`."""

    def __call__(
        self, q_HTD: Tensor, k_HLD: Tensor, v_HLV: Tensor, scale: float, *, causal: bool = False
    ) -> tuple[Tensor, Tensor]: ...


class LatentAttention(TorchAttention):
    """Owns the latent pages of a group of layers; the cache of a layer is [S, C]."""

    def _layer_size(self, slots: int) -> tuple[int, ...]:
        return slots, self.spec.latent_dim + self.spec.rope_dim

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        return _LaidOut(self, self._layout(decoding, chunks))

    def chunk_layouts(self, chunks: Sequence[Chunk], at: int) -> list[ChunkLayout]:
        """Of chunks whose pages are placed, the rows of the first of which begin at `at`."""
        layouts = []
        contexts = to_device(self.context_slots(chunks), self.device) if chunks else []
        for chunk, slots_L in zip(chunks, contexts, strict=True):
            layouts.append(self._chunk_layout(chunk, at, slots_L))
            at += chunk.length
        return layouts

    def context_slots(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """int64 [end] on the host, of each chunk: the slots of all it may see."""
        return [self._slots(chunk.request.row, 0, chunk.end) for chunk in chunks]

    def _chunk_layout(self, chunk: Chunk, at: int, slots_L: Tensor) -> ChunkLayout:
        """With a mask and the slots of the whole context where the absorbed form is to be used; else with the
        slots of what precedes the chunk."""
        if not expands(self.spec, chunk.start, chunk.length):
            return super()._chunk_layout(chunk, at, slots_L)
        earlier_L = slots_L[: chunk.start] if chunk.start else None
        return ChunkLayout(rows=slice(at, at + chunk.length), slots_L=earlier_L, mask_TL=None)

    def store(self, layer: int, slots_N: Tensor, latent_NC: Tensor) -> Tensor:
        """The cache [S, C] of a layer, once it has these."""
        cache_SC = self.layer_cache(layer)
        return cache_SC.index_copy_(0, slots_N, latent_NC)

    def attend_decoding(
        self, layout: StepLayout, cache_SC: Tensor, q_MHD: Tensor, up: UpProjection
    ) -> Tensor:
        """[M, H, Dv] of the tokens that decode, which are stored already."""
        k_1XC = cache_SC.index_select(0, layout.slots_BL)[None]
        v_1XL = k_1XC[..., : self.spec.latent_dim]
        return up.values(attend_decoding(up.absorb(q_MHD), k_1XC, v_1XL, layout, self.spec.scale))

    def attend_chunk(
        self, chunk: ChunkLayout, cache_SC: Tensor, q_THD: Tensor, latent_TC: Tensor, up: UpProjection
    ) -> Tensor:
        """[T, H, Dv] of the tokens of a chunk, which are stored already."""
        if chunk.slots_L is None or chunk.mask_TL is None:
            earlier, by = (cache_SC, chunk.slots_L), self._attend(len(q_THD))
            return attend_expanded(q_THD, latent_TC, up, self.spec.scale, earlier, by=by)
        k_1LC = cache_SC.index_select(0, chunk.slots_L)[None]
        v_1LL = k_1LC[..., : self.spec.latent_dim]
        mixed_THL = attend_chunk(up.absorb(q_THD), k_1LC, v_1LL, chunk.mask_TL, self.spec.scale)
        return up.values(mixed_THL)

    def _attend(self, tokens: int) -> Attend:
        """Over the keys and values that are made for a chunk of so many tokens."""
        if self.chosen is None or not self.chosen.takes_prompts([tokens]):
            return attend
        made: Attend = load(ATTENTION_BACKENDS.get(self.chosen.prompts).implementations[self.spec.kind])
        return made


@dataclass(frozen=True)
class _LaidOut(Attention):
    """Of a step, or one of its micro-batches."""

    paged: LatentAttention
    layout: StepLayout

    def latent(
        self, layer: int, q_NHD: Tensor, latent_NC: Tensor, up: UpProjection, index: Index | None = None
    ) -> Tensor:
        paged, layout, M = self.paged, self.layout, self.layout.num_decoding
        cache_SC, parts = paged.store(layer, layout.write_N, latent_NC), []
        if M:
            parts.append(paged.attend_decoding(layout, cache_SC, q_NHD[:M], up))
        for chunk in layout.chunks:
            parts.append(paged.attend_chunk(chunk, cache_SC, q_NHD[chunk.rows], latent_NC[chunk.rows], up))
        return torch.cat(parts) if parts else q_NHD.new_empty(0, *up.values_size)


def expands(spec: AttentionSpec, start: int, length: int) -> bool:
    """Whether a chunk is computed in the expanded form: by products, where both count those of one head.

    Expanding an earlier token costs Lc (Dn + Dv) of them, and not doing so 2 Lc + Dr - D - Dv for each token
    of the chunk. Its own tokens cost as much to expand as to absorb.
    """
    made = spec.head_dim - spec.rope_dim + spec.value_dim
    wider = 2 * spec.latent_dim + spec.rope_dim - spec.head_dim - spec.value_dim
    return start == 0 or length * wider >= spec.latent_dim * made


def attend_expanded(
    q_THD: Tensor,
    latent_TC: Tensor,
    up: UpProjection,
    scale: float,
    earlier: tuple[Tensor, Tensor | None],
    span: int = LATENT_SPAN,
    by: Attend | None = None,
) -> Tensor:
    """[T, H, Dv] of a chunk over its own tokens, latent [T, C], and those before it.

    earlier: the cache [S, C] and the slots, int64, of what precedes the chunk; None: nothing does. span: how
    many tokens are expanded at a time. by: what attends over them; None: `attend`.
    """
    q_HTD, T, by = q_THD.transpose(0, 1), len(q_THD), by or attend
    if span >= T and earlier[1] is None:
        return by(q_HTD, *up.expand(latent_TC), scale, causal=True)[0].transpose(0, 1)
    joined = _Joined(q_HTD, up)
    for start in range(0, T, span):
        end = min(start + span, T)
        k_HLD, v_HLV = up.expand(latent_TC[start:end])
        joined.add(slice(start, end), *by(q_HTD[:, start:end], k_HLD, v_HLV, scale, causal=True))
        if end < T:
            joined.add(slice(end, T), *by(q_HTD[:, end:], k_HLD, v_HLV, scale))
    cache_SC, slots_L = earlier
    for slots in () if slots_L is None else slots_L.split(span):
        joined.add(slice(0, T), *by(q_HTD, *up.expand(cache_SC.index_select(0, slots)), scale))
    return joined.out_HTV.to(q_THD.dtype).transpose(0, 1)


class _Joined:
    """Attention over several sets of keys, weighted by the log-sum-exp of their scores."""

    def __init__(self, q_HTD: Tensor, up: UpProjection):
        (H, Dv), T = up.values_size, q_HTD.shape[1]
        self.out_HTV = torch.zeros(H, T, Dv, dtype=torch.float32, device=q_HTD.device)
        self._lse_HT = torch.full((H, T), float("-inf"), dtype=torch.float32, device=q_HTD.device)

    def add(self, rows: slice, out_HTV: Tensor, lse_HT: Tensor) -> None:
        """Join the attention of these rows over more keys: out [H, rows, Dv], lse float32 [H, rows]."""
        before_HT, total_HT = self._lse_HT[:, rows], torch.logaddexp(self._lse_HT[:, rows], lse_HT)
        shrunk_HTV = self.out_HTV[:, rows] * (before_HT - total_HT).exp_()[..., None]
        self.out_HTV[:, rows] = shrunk_HTV.addcmul_(out_HTV.float(), (lse_HT - total_HT).exp_()[..., None])
        self._lse_HT[:, rows] = total_HT


def attend(
    q_HTD: Tensor, k_HLD: Tensor, v_HLV: Tensor, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """([H, T, Dv], float32 log-sum-exp [H, T] of the scores), by torch's fused kernels, which hold no scores.

    causal: T and L are equal, and a query sees no key behind its own. These kernels, but for the one in
    float32 on CUDA, take values as large as keys, so values are padded.
    """
    aten, size = torch.ops.aten, v_HLV.shape[-1]
    if q_HTD.device.type == "cuda" and q_HTD.dtype == torch.float32:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q_HTD[None], k_HLD[None], v_HLV[None], None, True, 0.0, causal, scale=scale
        )
        return out[0], lse[0, :, : q_HTD.shape[1]]
    given = q_HTD[None], k_HLD[None], F.pad(v_HLV, (0, k_HLD.shape[-1] - size))[None], 0.0, causal
    if q_HTD.device.type == "cuda":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*given, scale=scale)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*given, scale=scale)
    return out[0, ..., :size], lse[0]
