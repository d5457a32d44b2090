"""Scores of index keys in the pages of a sequence, for one query token each, and the largest (Triton).

    score[n, l] = sum over heads h of weights[n, h] * relu(q[n, h] . key[l])

A program scores a tile of one token's context with all heads, so that products are never stored. Another
goes through the scores of a token four times for the K-th largest, and then once more for places, so that
what is chosen is ascending and the lowest among equals; neither reads beyond a context.

Legend: N tokens, H index heads, D their size, HP/DP powers of two of those, S slots of the cache, P pages of
a row of the table, L = P * page size, K how many are chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early

TOKENS = 64  # of a context at a time
RANKED = 2048  # scores of a context at a time


@triton.jit(do_not_specialize=["table_stride", "L"])
def score_tile(
    q_ptr, weights_ptr, keys_ptr, table_ptr, ends_ptr, out_ptr, table_stride, L, stride,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out float32 [N, L]; -inf from ends[n] on, where nothing is read. Keys are `stride`
    apart, rows of the table `table_stride`."""
    n = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    h = tl.arange(0, HP)
    d = tl.arange(0, DP)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.load(ends_ptr + n)
    known = place < end
    scores = tl.full([TOKENS], float("-inf"), tl.float32)
    if tl.program_id(1) * TOKENS < end:
        held = (h[:, None] < H) & (d[None, :] < D)
        q = tl.load(q_ptr + (n * H + h[:, None]) * D + d[None, :], mask=held, other=0.0)
        weights = tl.load(weights_ptr + n * H + h, mask=h < H, other=0.0)
        page = tl.load(table_ptr + n * table_stride + place // PAGE, mask=known, other=0)
        slot = page.to(tl.int64) * PAGE + place % PAGE
        read = known[:, None] & (d[None, :] < D)
        keys = tl.load(keys_ptr + slot[:, None] * stride + d[None, :], mask=read, other=0.0)
        products = tl.maximum(tl.dot(q, tl.trans(keys), input_precision="ieee"), 0.0)
        scores = tl.where(known, tl.sum(products * weights[:, None], 0), float("-inf"))
    tl.store(out_ptr + n * L + place, scores, mask=place < L)


def scores(
    q_NHD: Tensor, weights_NH: Tensor, keys_SD: Tensor, table_NP: Tensor, ends_N: Tensor, *, page_size: int
) -> Tensor:
    """float32 [N, L]: of the first ends[n] keys in the pages of each row, then -inf.

    All contiguous, but for keys and the table, whose rows may lie anyhow; q and keys of one type, weights
    float32, table and ends int32 or int64. An end of 0 makes a row padding.
    """
    N, H, D = q_NHD.shape
    L = table_NP.shape[1] * page_size
    out_NL = torch.empty(N, L, dtype=torch.float32, device=q_NHD.device)
    powers = [max(16, triton.next_power_of_2(size)) for size in (H, D)]
    early = launches_early(q_NHD.device)
    if N:
        score_tile[(N, triton.cdiv(L, TOKENS))](
            q_NHD, weights_NH, keys_SD, table_NP, ends_N, out_NL, table_NP.stride(0), L, keys_SD.stride(0),
            H, D, *powers, page_size, TOKENS, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out_NL


@triton.jit
def _ranks(scores_ptr, at, end, BLOCK: tl.constexpr):
    """(places from `at` on, whether they are known, uint32 that are ordered as their scores)."""
    place = at + tl.arange(0, BLOCK)
    known = place < end
    score = tl.load(scores_ptr + place, mask=known, other=0.0)
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)  # no -0, which equals 0
    return place, known, tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _least_of_largest(scores_ptr, end, K, BLOCK: tl.constexpr):
    """(the rank of the K-th largest of the first `end` scores, how many of that rank are among the K
    largest): eight bits at a time, from the highest on, by how many of the scores have which."""
    least = tl.full([], 0, tl.uint32)
    room = K
    digit = tl.arange(0, 256)
    for i in tl.static_range(4):
        count = tl.zeros([256], tl.int32)
        for at in range(0, end, BLOCK):
            _, held, rank = _ranks(scores_ptr, at, end, BLOCK)
            if i > 0:
                held = held & ((rank >> (32 - 8 * i)) == (least >> (32 - 8 * i)))
            count += tl.histogram(((rank >> (24 - 8 * i)) & 255).to(tl.int32), 256, mask=held)
        larger = tl.sum(count, 0) - tl.cumsum(count, 0)
        found = tl.sum((larger + count >= room).to(tl.int32), 0) - 1
        room -= tl.sum(tl.where(digit == found, larger, 0), 0)
        least = least | (found.to(tl.uint32) << (24 - 8 * i))
    return least, room


@triton.jit(do_not_specialize=["table_stride", "L"])
def choose_places(
    scores_ptr, table_ptr, ends_ptr, out_ptr, counts_ptr, table_stride, L, K,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out int32 [N, K]: slots of the K largest of the first ends[n] scores [N, L], then -1; counts [N]."""
    n = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.load(ends_ptr + n).to(tl.int32)
    scores_ptr += n * L
    least = tl.full([], 0, tl.uint32)
    room = end
    if end > K:
        least, room = _least_of_largest(scores_ptr, end, K, BLOCK)
    taken = 0
    equals = 0
    for at in range(0, end, BLOCK):
        place, known, rank = _ranks(scores_ptr, at, end, BLOCK)
        equal = (known & (rank == least)).to(tl.int32)
        chosen = (known & (rank > least)) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= room))
        to = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        page = tl.load(table_ptr + n * table_stride + place // PAGE, mask=chosen, other=0)
        slot = page.to(tl.int32) * PAGE + place % PAGE
        tl.store(out_ptr + n * K + to, slot, mask=chosen)
        taken += tl.sum(chosen.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
    for at in range(taken, K, BLOCK):
        rest = at + tl.arange(0, BLOCK)
        tl.store(out_ptr + n * K + rest, tl.full([BLOCK], -1, tl.int32), mask=rest < K)
    tl.store(counts_ptr + n, taken)


def chosen(
    scores_NL: Tensor, table_NP: Tensor, ends_N: Tensor, count: int, *, page_size: int
) -> tuple[Tensor, Tensor]:
    """(int32 [N, K]: the slots of the K = `count` largest of the first ends[n] scores, by place, then -1;
    int32 [N]: how many these are). Contiguous but for rows of the table; scores float32 without NaN, table
    and ends as of `scores`.
    """
    N, L = scores_NL.shape
    out_NK = torch.empty(N, count, dtype=torch.int32, device=scores_NL.device)
    counts_N = torch.empty(N, dtype=torch.int32, device=scores_NL.device)
    early = launches_early(scores_NL.device)
    if N:
        choose_places[(N,)](
            scores_NL, table_NP, ends_N, out_NK, counts_N, table_NP.stride(0), L, count, page_size, RANKED,
            early, num_warps=8, launch_pdl=early,
        )  # fmt: skip
    return out_NK, counts_N
