"""Rows to the layout "batched_experts" and back, with numbers of rows that only the device knows (Triton).

Of N rows with k ids each, those of expert e go to the first rows of batch e, in their order; each has room
for all. Three launches of fixed size, so that a graph may hold them; rows without an expert of this rank cost
a look at their ids.

Legend: N rows, k top-k, E experts of this rank, C = N rows per expert, W words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 1024  # that are counted at once
WORDS = 1024  # or values that are moved at once


@triton.jit(do_not_specialize=["pairs", "C"])
def find_places(ids_ptr, places_ptr, counts_ptr, pairs, first, C, PAIRS: tl.constexpr):
    """counts[e]: how many of the ids are expert first + e; places of those: their rows of E C."""
    expert = tl.program_id(0)
    count = expert * 0
    for start in range(0, pairs, PAIRS):
        p = start + tl.arange(0, PAIRS)
        hit = tl.load(ids_ptr + p, mask=p < pairs, other=-1) == first + expert
        before = tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(places_ptr + p, expert.to(tl.int64) * C + count + before, mask=hit)
        count += tl.sum(hit.to(tl.int32), 0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def spread_rows(row_ptr, ids_ptr, places_ptr, batched_ptr, W, K: tl.constexpr, WORDS: tl.constexpr):
    """Row n, of W words, to each of its places."""
    n = tl.program_id(0).to(tl.int64)
    for k in range(K):
        if tl.load(ids_ptr + n * K + k) >= 0:
            place = tl.load(places_ptr + n * K + k)
            for start in range(0, W, WORDS):
                w = start + tl.arange(0, WORDS)
                word = tl.load(row_ptr + n * W + w, mask=w < W, other=0)
                tl.store(batched_ptr + place * W + w, word, mask=w < W)


@triton.jit
def weigh_rows(y_ptr, ids_ptr, places_ptr, weights_ptr, out_ptr, H, K: tl.constexpr, WORDS: tl.constexpr):
    """out[n] = sum over k of weight * y[place], in float32, in their order; rows without a place stay."""
    n = tl.program_id(0).to(tl.int64)
    wanted = -1
    for k in range(K):
        wanted = tl.maximum(wanted, tl.load(ids_ptr + n * K + k))
    if wanted >= 0:
        for start in range(0, H, WORDS):
            h = start + tl.arange(0, WORDS)
            total = tl.zeros([WORDS], tl.float32)
            for k in range(K):
                held = tl.load(ids_ptr + n * K + k) >= 0
                place = tl.load(places_ptr + n * K + k, mask=held, other=0)
                weight = tl.load(weights_ptr + n * K + k)
                y = tl.load(y_ptr + place * H + h, mask=held & (h < H), other=0.0)
                total += weight * y.to(tl.float32)
            tl.store(out_ptr + n * H + h, total, mask=h < H)


def places(ids_NK: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """(int64 [N, k], int32 [E]): where each id's row is among E N, for ids that are not -1, all of
    which are of experts [first, first + count); and rows in use."""
    places_NK = torch.empty_like(ids_NK, dtype=torch.int64)
    counts_E = torch.empty(count, dtype=torch.int32, device=ids_NK.device)
    find_places[(count,)](ids_NK, places_NK, counts_E, ids_NK.numel(), first, len(ids_NK), PAIRS)
    return places_NK, counts_E


def spread(rows: Tensor, ids_NK: Tensor, places_NK: Tensor, count: int) -> Tensor:
    """rows [N, ...], contiguous, as [E, N, ...], of which only rows in use are written."""
    batched = rows.new_empty(count, *rows.shape)
    if len(rows):
        words, out = rows.view(torch.int16), batched.view(torch.int16)
        spread_rows[(len(rows),)](words, ids_NK, places_NK, out, words.shape[-1], ids_NK.shape[1], WORDS)
    return batched


def weigh(y: Tensor, ids_NK: Tensor, places_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """y [E, N, H] to [N, H], each row's results weighted and summed; rows without any: anything."""
    out_NH = y.new_empty(y.shape[1:])
    if len(out_NH):
        k = ids_NK.shape[1]
        weigh_rows[(len(out_NH),)](y, ids_NK, places_NK, weights_NK, out_NH, y.shape[2], k, WORDS)
    return out_NH
