"""Paged attention on a CPU by compiled kernels, where their sizes fit; else by torch's (torch.py).

Decoding tokens and chunks are computed alike, by a kernel that walks the pages of each context: nothing is
gathered or padded. A page's room is the same as torch's attention gives it, but laid out for the kernel.

Legend: N tokens of the step, Hq/Hkv query/KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnout.attention.backends import Chosen, choose
from turnout.attention.compressed import CompressedAttention
from turnout.attention.interface import Attention, Chunk
from turnout.attention.kinds import CacheGroup
from turnout.attention.latent import LatentAttention
from turnout.attention.sparse_latent import SparseLatentAttention
from turnout.attention.torch import PagedAttention, place_of
from turnout.vocabulary import AttentionKind


def paged_attention(
    group: CacheGroup,
    *,
    page_size: int,
    device: torch.device,
    dtype: torch.dtype,
    chosen: Chosen | None = None,
    drafts: int = 0,
    snapshots: int = 0,
    **rest: Any,
) -> PagedAttention:
    """The engine's attention for this device and model; arguments are those of `PagedAttention`, and of
    `CompressedAttention`, which keeps states."""
    chosen = chosen or choose(group.spec, place_of(device, dtype, page_size))
    kind = CompiledAttention if chosen and chosen.backend == "cpu" else PagedAttention
    if group.spec.kind == AttentionKind.LATENT:
        kind = LatentAttention
    if group.spec.kind == AttentionKind.SPARSE_LATENT:
        kind = SparseLatentAttention
    if group.spec.kind == AttentionKind.COMPRESSED:
        kind, rest = CompressedAttention, rest | {"drafts": drafts, "snapshots": snapshots}
    return kind(group, page_size=page_size, device=device, dtype=dtype, chosen=chosen, **rest)


class CompiledAttention(PagedAttention):
    """What the declaration of `cpu` says (backends.py)."""

    def __init__(self, group: CacheGroup, **rest: Any) -> None:
        super().__init__(group, **rest)
        from turnout.kernels.cpu import attention

        self._kernels = attention
        self._blocks = self._cache.flatten(2)  # [layers, Hkv, slots * 2 * D]

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        for chunk in (*decoding, *chunks):
            self._place(chunk.request)
        laid_out = self._kernels.Chunks(
            [(c.request.row, c.start, c.length) for c in (*decoding, *chunks)], self.group, self.spec.window
        )
        return _LaidOut(self, laid_out)

    def compute(
        self, chunks: Any, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None
    ) -> Tensor:
        out_NHD: Tensor = self._kernels.attend(
            q_NHD,
            k_NHD,
            v_NHD,
            self._blocks[self.index[layer]],
            chunks,
            self._table_RP,
            self.page_size,
            scale=self.spec.scale,
            sinks_H=sinks_H,
        )
        return out_NHD


@dataclass(frozen=True)
class _LaidOut(Attention):
    """Of a step, or one of its micro-batches."""

    paged: CompiledAttention
    chunks: Any

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        return self.paged.compute(self.chunks, layer, q_NHD, k_NHD, v_NHD, sinks_H)
