"""Scores of index keys in the pages of a sequence, for one query token each (Triton).

    score[n, l] = sum over heads h of weights[n, h] * relu(q[n, h] . key[l])

A program scores a tile of one token's context with all heads, so that products are never stored.

Legend: N tokens, H index heads, D their size, HP/DP powers of two of those, S slots of the cache, P pages of
a row of the table, L = P * page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64  # of a context at a time


@triton.jit(do_not_specialize=["P"])
def score_tile(
    q_ptr, weights_ptr, keys_ptr, table_ptr, ends_ptr, out_ptr, P,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """out float32 [N, L]; -inf from ends[n] on, where nothing is read."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    h = tl.arange(0, HP)
    d = tl.arange(0, DP)
    end = tl.load(ends_ptr + n)
    known = place < end
    scores = tl.full([TOKENS], float("-inf"), tl.float32)
    if tl.program_id(1) * TOKENS < end:
        held = (h[:, None] < H) & (d[None, :] < D)
        q = tl.load(q_ptr + (n * H + h[:, None]) * D + d[None, :], mask=held, other=0.0)
        weights = tl.load(weights_ptr + n * H + h, mask=h < H, other=0.0)
        page = tl.load(table_ptr + n * P + place // PAGE, mask=known, other=0)
        slot = page.to(tl.int64) * PAGE + place % PAGE
        read = known[:, None] & (d[None, :] < D)
        keys = tl.load(keys_ptr + slot[:, None] * D + d[None, :], mask=read, other=0.0)
        products = tl.maximum(tl.dot(q, tl.trans(keys), input_precision="ieee"), 0.0)
        scores = tl.where(known, tl.sum(products * weights[:, None], 0), float("-inf"))
    tl.store(out_ptr + n * P * PAGE + place, scores, mask=place < P * PAGE)


def scores(
    q_NHD: Tensor, weights_NH: Tensor, keys_SD: Tensor, table_NP: Tensor, ends_N: Tensor, *, page_size: int
) -> Tensor:
    """float32 [N, L]: of the first ends[n] keys in the pages of each row, then -inf.

    All contiguous; q and keys of one type, weights float32, table and ends int32 or int64. An end of 0 makes
    a row padding.
    """
    N, H, D = q_NHD.shape
    P = table_NP.shape[1]
    out_NL = torch.empty(N, P * page_size, dtype=torch.float32, device=q_NHD.device)
    powers = [max(16, triton.next_power_of_2(size)) for size in (H, D)]
    if N:
        score_tile[(N, triton.cdiv(P * page_size, TOKENS))](
            q_NHD, weights_NH, keys_SD, table_NP, ends_N, out_NL, P, H, D, *powers, page_size, TOKENS,
            num_warps=4,
        )  # fmt: skip
    return out_NL
