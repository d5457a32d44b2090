"""Causal attention of prompts over their paged contexts, all chunks of a step in one launch (Triton).

A program has a tile of queries, the tokens of one chunk times the heads that share a key, and goes through
the context that the first of them sees with no mask, then through what is left with one. Keys and values are
read from their pages; nothing is gathered or padded before, and no mask is made. Tiles come longest first, so
that none is left over at the end.

Legend: N rows of the step, Hq/Hkv query/KV heads, G = Hq/Hkv, GP its power of two, D head size, DP its power
of two, S slots of the cache, B chunks, P pages of a row of the table, T tiles, ROWS tokens of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

FIELDS = 4  # of a tile: first row, tokens, place of the first in its context, and what is given of its chunk
QUERIES = 64  # of a tile: with 128 and eight warps prompts of 2048 tokens take 114 us, with these 107
BLOCK = 64  # tokens of a context at a time


@triton.jit
def attend_block(
    q, best, total, acc, base_ptr, table_ptr, at, low, end, place_M, scale,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax's state after TOKENS more keys, from `at` on. MASKED: not all rows see all of them,
    and what is not in [low, end) is not even read."""
    place = at + tl.arange(0, TOKENS)
    d = tl.arange(0, DP)
    if MASKED:
        known = (place >= low) & (place < end)
        page = tl.load(table_ptr + place // PAGE, mask=known, other=0)
        held = known[:, None] & (d[None, :] < D)
    else:
        page = tl.load(table_ptr + place // PAGE)
        held = d[None, :] < D
    slot = page.to(tl.int64) * PAGE + place % PAGE
    k_at = base_ptr + slot[:, None] * (2 * D) + d[None, :]
    if MASKED or D < DP:
        k = tl.load(k_at, mask=held, other=0.0)
    else:
        k = tl.load(k_at)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        seen = place[None, :] <= place_M[:, None]
        if WINDOW:
            seen &= place[None, :] > place_M[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - higher)
    p = tl.exp2(scores - higher[:, None])
    if MASKED or D < DP:
        v = tl.load(k_at + D, mask=held, other=0.0)
    else:
        v = tl.load(k_at + D)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit
def attend_blocks(
    q, best, total, acc, base_ptr, table_ptr, begin, stop, low, end, place_M, scale,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The state after the keys in [begin, stop), TOKENS at a time; see `attend_block`."""
    for at in range(begin, stop, TOKENS):
        best, total, acc = attend_block(
            q, best, total, acc, base_ptr, table_ptr, at, low, end, place_M, scale,
            D, DP, PAGE, TOKENS, WINDOW, MASKED,
        )  # fmt: skip
    return best, total, acc


@triton.jit(do_not_specialize=["P"])
def attend_tiles(
    q_ptr, cache_ptr, tiles_ptr, table_ptr, sinks_ptr, out_ptr, scale, head_stride, P, Hkv,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out [N, Hq, D] of the rows of each tile; `scale` includes log2(e).

    WINDOW: each row sees so many tokens, itself included; 0: all before it. SINKS: sinks float32 [Hq] take
    part in the softmax, which then begins with them.
    """
    tile = tiles_ptr + tl.program_id(0) * 4
    h = tl.program_id(1).to(tl.int64)
    first, count = tl.load(tile), tl.load(tile + 1)
    start, owner = tl.load(tile + 2).to(tl.int32), tl.load(tile + 3)
    m = tl.arange(0, ROWS * GP)
    token, g = m // GP, m % GP
    d = tl.arange(0, DP)
    held = ((token < count) & (g < G))[:, None] & (d[None, :] < D)
    at = ((first + token) * Hkv * G + h * G + g)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=held, other=0.0)
    place_M = start + token
    end = start + count.to(tl.int32)
    seen = (start + 1) // TOKENS * TOKENS
    # Finite, for a row may see nothing of a tile's first block.
    best = tl.full([ROWS * GP], -1e30 if WINDOW else float("-inf"), tl.float32)
    total = tl.zeros([ROWS * GP], tl.float32)
    if SINKS:
        best = tl.load(sinks_ptr + h * G + g, mask=g < G, other=0.0) * 1.4426950408889634  # log2(e)
        total += 1.0
    acc = tl.zeros([ROWS * GP, DP], tl.float32)
    base, pages = cache_ptr + h * head_stride, table_ptr + owner * P
    low, begin = 0, 0
    if WINDOW:
        low = tl.maximum(start - WINDOW + 1, 0)
        begin = low // TOKENS * TOKENS
        whole = tl.cdiv(tl.maximum(end - WINDOW, 0), TOKENS) * TOKENS  # no row's window begins later
        best, total, acc = attend_blocks(
            q, best, total, acc, base, pages, begin, tl.minimum(whole, end), low, end, place_M, scale,
            D, DP, PAGE, TOKENS, WINDOW, True,
        )  # fmt: skip
        begin = whole
        seen = tl.maximum(seen, whole)
    best, total, acc = attend_blocks(
        q, best, total, acc, base, pages, begin, seen, low, end, place_M, scale,
        D, DP, PAGE, TOKENS, WINDOW, False,
    )  # fmt: skip
    best, total, acc = attend_blocks(
        q, best, total, acc, base, pages, seen, end, low, end, place_M, scale,
        D, DP, PAGE, TOKENS, WINDOW, True,
    )  # fmt: skip
    out = acc / total[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=held)


def tile_tokens(group: int, queries: int = QUERIES) -> int:
    """ROWS: tokens of a tile of `queries` rows where as many query heads share a key."""
    return max(1, queries // triton.next_power_of_2(group))


def tiles(chunks: Sequence[tuple[int, int, int, int]], tokens: int) -> Tensor:
    """int64 [tiles, FIELDS] on the host, those that take longest first. chunks: (first row in the step,
    start, end, a number of the chunk: here its row of the table) of each; tokens: of a tile."""
    rows_B, starts_B, ends_B, numbers_B = np.array(chunks, dtype=np.int64).reshape(-1, FIELDS).T
    tiles_B = (ends_B - starts_B + tokens - 1) // tokens
    owners_T = np.repeat(np.arange(len(tiles_B)), tiles_B)
    skipped_T = (np.arange(len(owners_T)) - (tiles_B.cumsum() - tiles_B)[owners_T]) * tokens
    places_T = starts_B[owners_T] + skipped_T
    counts_T = np.minimum(ends_B[owners_T] - places_T, tokens)
    fields = rows_B[owners_T] + skipped_T, counts_T, places_T, numbers_B[owners_T]
    return torch.from_numpy(np.stack(fields, axis=1)[(-places_T).argsort(kind="stable")])


def attend(
    q_NHD: Tensor,
    cache_HS2D: Tensor,
    tiles_TF: Tensor,
    table_BP: Tensor,
    out_NHD: Tensor,
    *,
    page_size: int,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> None:
    """Fill the rows of `out` that the tiles cover: each attends to its context up to itself.

    scale: of scores. window: to so many tokens, itself included; 0: all. sinks: float32 [Hq], contiguous.
    q, out [N, Hq, D], contiguous; cache [Hkv, S, 2, D] with contiguous slots; tiles int64 as of `tiles`;
    table int64 [B, P], contiguous: the pages of each chunk's context.
    """
    Hq, D = q_NHD.shape[1:]
    Hkv = len(cache_HS2D)
    G = Hq // Hkv
    if not len(tiles_TF):
        return
    DP = max(16, triton.next_power_of_2(D))
    attend_tiles[(len(tiles_TF), Hkv)](
        q_NHD, cache_HS2D, tiles_TF, table_BP, tiles_TF if sinks_H is None else sinks_H, out_NHD,
        scale * math.log2(math.e), cache_HS2D.stride(0), table_BP.shape[1], Hkv,
        G, triton.next_power_of_2(G), D, DP, page_size,
        tile_tokens(G), BLOCK, window, sinks_H is not None,
        # Larger heads in three stages would need more memory than a multiprocessor has.
        num_warps=4 if DP <= 128 else 8, num_stages=3 if DP <= 128 else 2,
    )  # fmt: skip
