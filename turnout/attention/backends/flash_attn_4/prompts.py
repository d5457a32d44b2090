"""Attention of prompts by the library flash-attn-4 (CuTe DSL), over pages that our kernels decode from.

The library reads keys and values from views of a cache [Hkv, S, 2, D], whose strides are no matter to it. It
loads whole tiles, of 64 to 128 tokens: tokens that no row sees are masked, but a NaN among their values would
still spoil the sum. So nothing of another request may stand in a tile: pages below a window, which may be
another's by now, are replaced by the request's own, and what follows the end of a context in its last page
is cleared.

Legend: T rows of the prompts of a step, B prompts, Hq/Hkv query/KV heads, D head size, S slots of the
cache, P pages of a row of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnout.attention.interface import Chunk
from turnout.attention.paged import PagedAttention, to_device


class FlashAttn4Prompts:
    """Of a step, or of one of its micro-batches: its chunks of prompts."""

    def __init__(self, paged: PagedAttention, chunks: Sequence[Chunk], table_BP: Tensor):
        """table: int64 [B, P] on the host, the pages of each chunk's context."""
        size, spec = paged.page_size, paged.spec
        if spec.window:
            first_B = torch.tensor([spec.first_seen(chunk.start) // size for chunk in chunks])
            pages_P = torch.arange(table_BP.shape[1])
            table_BP = table_BP.gather(1, torch.maximum(pages_P, first_B[:, None]))
        ends_B = torch.tensor([chunk.end for chunk in chunks])
        rows = torch.tensor([0, *(chunk.length for chunk in chunks)]).cumsum(0)
        behind = [_behind(pages_P, end, size) for pages_P, end in zip(table_BP, ends_B.tolist(), strict=True)]
        *placed, behind_X = to_device([table_BP, rows, ends_B, torch.cat(behind)], paged.device)
        self._table_BP, self._rows, self._ends_B = (x.to(torch.int32) for x in placed)
        paged.cache[..., 1, :].index_fill_(2, behind_X, 0)
        self._paged = paged
        self._kv = paged.cache.unflatten(2, (-1, size)).permute(0, 4, 2, 3, 1, 5)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor, sinks_H: Tensor | None) -> None:
        """Write the attention of the prompts' T rows, whose keys and values are stored, to out [T, Hq, D].

        q: [T, Hq, D], contiguous as `out` is; sinks: float32 [Hq], or None.
        """
        # Its public functions cannot write to a given tensor.
        from flash_attn.cute.interface import _flash_attn_fwd

        spec = self._paged.spec
        k, v = self._kv[self._paged.index[layer]]  # [pages, page size, Hkv, D]
        _flash_attn_fwd(
            q_THD,
            k,
            v,
            cu_seqlens_q=self._rows,
            seqused_k=self._ends_B,
            page_table=self._table_BP,
            softmax_scale=spec.scale,
            causal=True,
            window_size_left=spec.window - 1 if spec.window else None,
            learnable_sink=sinks_H,
            out=out_THD,
        )


def _behind(pages_P: Tensor, end: int, page_size: int) -> Tensor:
    """The slots that follow the first `end` tokens in their last page."""
    last = (end - 1) // page_size
    return pages_P[last] * page_size + torch.arange(end - last * page_size, page_size)
