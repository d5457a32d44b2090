"""Paged attention on a CPU by compiled kernels.

Decoding tokens and chunks are computed alike, by a kernel that walks the pages of each context: nothing is
gathered or padded. A page's room is the same as torch's attention gives it, but laid out for the kernel.

Legend: N tokens of the step, Hq/Hkv query/KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from turnout.attention.interface import Attention, Chunk
from turnout.attention.kinds import CacheGroup
from turnout.attention.paged import PagedAttention


class CompiledAttention(PagedAttention):
    """Keys and values in pages, by one kernel for decoding tokens and chunks alike."""

    def __init__(self, group: CacheGroup, **rest: Any) -> None:
        super().__init__(group, **rest)
        from turnout.kernels.cpu import attention

        self.kernels = attention
        cache = self._cache.flatten(2)  # [layers, Hkv, slots * 2 * D]
        self.caches = {
            layer: attention.Cache(
                cache[i],
                self.host_table,
                self.page_size,
                window=self.spec.window,
                scale=self.spec.scale,
            )
            for layer, i in self.index.items()
        }

    def laid_out(self, decoding: Sequence[Chunk], chunks: Sequence[Chunk]) -> Attention:
        for chunk in (*decoding, *chunks):
            self._place(chunk.request)
        laid_out = self.kernels.Chunks(
            [(c.request.row, c.start, c.length) for c in (*decoding, *chunks)], self.group, self.spec.window
        )
        return _LaidOut(self, laid_out)


@dataclass(frozen=True)
class _LaidOut(Attention):
    """Of a step, or one of its micro-batches."""

    paged: CompiledAttention
    chunks: Any

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        paged = self.paged
        cache = paged.caches[layer]
        out_NHD: Tensor = paged.kernels.attend(q_NHD, k_NHD, v_NHD, self.chunks, cache, sinks_H)
        return out_NHD

    def compiled(self, layer: int) -> tuple[Any, Any] | None:
        return self.chunks, self.paged.caches[layer]
