"""Attention of single tokens by the Triton kernel for decoding (kernels/attention/decode.py), on CUDA.

Unlike torch's it gathers no context and makes no mask, and the kernel that rotates keys may store them.

Legend: N tokens, P pages of the widest context, Hq/Hkv query/KV heads, D head size, S slots of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turnout.attention.interface import Attention, ProjectedHeads
from turnout.attention.paged import PagedAttention

if TYPE_CHECKING:
    from turnout.kernels.attention.decode import Cut
    from turnout.kernels.attention.decode_heads import Programs


class StoredAttention(Attention):
    """Over a cache that holds each token in a slot."""

    def __init__(self, paged: PagedAttention, slots_N: Tensor):
        self._paged, self._slots_N = paged, slots_N

    def __call__(
        self, layer: int, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        cache_HS2D, slots_N = self.place(layer)
        cache_HS2D.index_copy_(1, slots_N, torch.stack((k_NHD, v_NHD), dim=2).transpose(0, 1))
        return self.attend(layer, q_NHD, sinks_H)

    def place(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._paged.layer_cache(layer), self._slots_N


def cut_of(paged: PagedAttention, rows: int, context: int = 0) -> Cut:
    """How the kernel cuts contexts: by what these may become, not by what they are, since each cut is a
    kernel of its own. context: tokens that none has more of; 0: what a request may have."""
    from turnout.kernels.attention import decode

    head_dim, itemsize = paged.spec.head_dim, paged.cache.element_size()
    if paged.fixed_spans:
        return decode.Cut(paged.fixed_spans, decode.block_of(head_dim, itemsize))
    longest = context or paged.table.shape[1] * paged.page_size
    return decode.cut_of(
        rows, paged.cache.shape[1], head_dim, itemsize, longest, paged.spec.window, paged.processors
    )


class RowAttention(StoredAttention):
    """Of one token per row, whose rows and lengths are read on the device."""

    def __init__(self, paged: PagedAttention, slots_N: Tensor, table_NP: Tensor, ends_N: Tensor):
        """slots, table, ends: int64; an end of 0 makes a row padding, which attends to nothing."""
        super().__init__(paged, slots_N)
        self._table_NP, self._ends_N = table_NP, ends_N
        self._cut = cut_of(paged, len(slots_N), table_NP.shape[1] * paged.page_size)
        self._programs = self._programs_of_heads()

    def attend(
        self, layer: int, q_NHD: Tensor, sinks_H: Tensor | None = None, out_NHD: Tensor | None = None
    ) -> Tensor:
        from turnout.kernels.attention.decode import attend

        return attend(
            q_NHD.contiguous(),
            self._paged.layer_cache(layer),
            self._table_NP,
            self._ends_N,
            sinks_H=sinks_H,
            out_BHD=out_NHD,
            cut=self._cut,
            **self._sizes(),
        )

    def _programs_of_heads(self) -> Programs | None:
        """Those that attend to what a projection gives; None where kernels of their own make heads of it."""
        from turnout.kernels.attention.decode_heads import programs_of

        paged, spec = self._paged, self._paged.spec
        if paged.drafts or paged.fixed_spans:  # rows of one request, and results that no batch may change
            return None
        itemsize = paged.cache.element_size()
        sizes = spec.num_kv_heads, spec.head_dim, itemsize, spec.window, paged.processors
        return programs_of(self._cut, len(self._slots_N), *sizes)

    def attend_projected(
        self, layer: int, projected: ProjectedHeads, sinks_H: Tensor | None = None
    ) -> Tensor | None:
        from turnout.kernels.attention.decode_heads import attend

        if self._programs is None:
            return None
        return attend(
            *projected,
            self._paged.layer_cache(layer),
            self._slots_N,
            self._table_NP,
            self._ends_N,
            programs=self._programs,
            sinks_H=sinks_H,
            **self._sizes(),
        )

    def _sizes(self) -> dict[str, Any]:
        """What kernels must know of the cache and of contexts, for all layers alike."""
        spec = self._paged.spec
        return {
            "page_size": self._paged.page_size,
            "scale": spec.scale,
            "window": spec.window,
        }
