"""All that a decode step does between two products of attention, in one launch (Triton).

With few requests a step is as long as its chain of launches. Elsewhere three of them lie here: heads are
normed, rotated and stored (kernels/common/rows.py), programs attend to spans of a context, and others join
the spans (decode.py). Here a program turns the queries that it attends with itself, from the parts that the
product left; each makes the new token's key and value with them, and the one whose span ends with it stores
them before it reads the span. What spans gave is joined by the program that
is the last of its context and KV head to be done, which a counter tells it that it leaves at 0. Programs
whose span is empty end at once, and nothing is joined where one span holds a whole context.

Rows are of different sequences: none sees the new token of another. Spans are computed as by `attend_span`,
and joined in their order, so that no result depends on which program came last.

Legend: B sequences, Hq/Hkv query/KV heads, G = Hq/Hkv, GJ its power of two, GP that of G + 2, at least 16, D
head size, DP its power of two, S slots of the cache, P pages of a row of the table, N splits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.attention.decode import BLOCK, ROWS
from turnout.kernels.common.dependent import launches_early

MOST_SPLITS = 64  # whose log-sum-exps one program has in registers
JOINED = 4096  # values of spans that it adds up at a time
REGISTERS = 128  # of a thread, which leave a multiprocessor four programs, where many requests have one each


@triton.jit
def turn_heads_of(
    row_ptr, weight_ptr, cos_ptr, sin_ptr, head, turned, held, part_stride, eps,
    D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """float32 [R, DP], where `held`: heads [R] of a row, the sum of PARTS; those that are `turned` are normed
    with weight [G, D] and rotated."""
    d = tl.arange(0, DP)
    across = ((d + D // 2) % D)[None, :]
    first = head[:, None] * D
    at = row_ptr + first
    x = tl.load(at + d[None, :], mask=held, other=0.0).to(tl.float32)
    y = tl.load(at + across, mask=held, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * part_stride + d[None, :], mask=held, other=0.0).to(tl.float32)
        y += tl.load(at + part * part_stride + across, mask=held, other=0.0).to(tl.float32)
    z = x
    if NORM:
        normed = held & turned[:, None]
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        z = x * (scale * tl.load(weight_ptr + first + d[None, :], mask=normed, other=0.0).to(tl.float32))
        y *= scale * tl.load(weight_ptr + first + across, mask=normed, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return tl.where(turned[:, None], z * cos + y * sin, x)


@triton.jit
def fetch_block(
    cache_ptr, table_ptr, start, stop,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Ask for the keys and values of a block, 16 bits each, so that they are in the L2 cache when they are
    read."""
    LINE: tl.constexpr = 64  # values of 128 bytes
    LINES: tl.constexpr = DP * 2 // LINE if DP > 32 else 1
    place = start + tl.arange(0, TOKENS)
    i = tl.arange(0, LINES)
    page = tl.load(table_ptr + place // PAGE, mask=place < stop, other=0)
    slot = page.to(tl.int64) * PAGE + place % PAGE
    at = cache_ptr + slot[:, None] * (2 * D) + tl.minimum(i * LINE, 2 * D - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64, bitcast=True)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def join_live_spans(
    partial_ptr, lse_ptr, sinks_ptr, out_ptr, first_row, first_head, live, SPLITS,
    G: tl.constexpr, GJ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MOST: tl.constexpr,
    CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out of G rows, from `first_row` on: the first `live` of their SPLITS spans, weighted by their share of
    the softmax, in which sinks [Hq] from `first_head` on have a share too if SINKS."""
    g = tl.arange(0, GJ)
    d = tl.arange(0, DP)
    n = tl.arange(0, MOST)
    rows = first_row + g
    lse_at = lse_ptr + rows[:, None] * SPLITS
    here = (g[:, None] < G) & (n[None, :] < live)
    lse = tl.load(lse_at + n[None, :], mask=here, other=float("-inf"), cache_modifier=".cg")
    best = tl.max(lse, 1)
    if SINKS:
        sink = tl.load(sinks_ptr + first_head + g, mask=g < G, other=0.0) * 1.4426950408889634  # log2(e)
        best = tl.maximum(best, sink)
    best = tl.where(best > float("-inf"), best, 0.0)
    total = tl.sum(tl.exp2(lse - best[:, None]), 1)
    if SINKS:
        total += tl.exp2(sink - best)
    acc = tl.zeros([GJ, DP], tl.float32)
    c = tl.arange(0, CHUNK)
    for first in tl.range(0, live, CHUNK, num_stages=4):
        some = (g[:, None] < G) & (first + c[None, :] < live)
        lse_c = tl.load(lse_at + first + c[None, :], mask=some, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(lse_c - best[:, None])
        at = (rows[:, None, None] * SPLITS + first + c[None, :, None]) * D + d[None, None, :]
        held = some[:, :, None] & (d[None, None, :] < D)
        spans = tl.load(partial_ptr + at, mask=held, other=0.0, cache_modifier=".cg")
        acc += tl.sum(spans * weight[:, :, None], 1)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    held = (g[:, None] < G) & (d[None, :] < D)
    tl.store(out_ptr + rows[:, None] * D + d[None, :], out.to(out_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["part_stride", "P", "SPLITS"])
def rotate_store_attend(
    heads_ptr, weight_ptr, cos_ptr, sin_ptr, slots_ptr, cache_ptr, table_ptr, ends_ptr, sinks_ptr,
    partial_ptr, lse_ptr, done_ptr, out_ptr,
    row_stride, part_stride, head_stride, scale, eps, P, Hkv, SPLITS,
    G: tl.constexpr, GP: tl.constexpr, GJ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, NORM: tl.constexpr,
    PARTS: tl.constexpr, ONE: tl.constexpr, MOST: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [B, Hq, D] of heads: queries, keys and values of rows `row_stride` apart, (Hq + 2 Hkv) D values
    each, the sum of PARTS that are `part_stride` apart.

    weight [Hq + Hkv, D], of norms, if NORM; cos, sin [B, D], sin with the rotation's sign. The key and the
    value of row b go to cache[h, slots[b]], which is also where the table has place ends[b] - 1; of a row
    that is padding, whose end is 0, nothing is stored. The rest as of `attend_span`. partial float32
    [B, Hq, N, D], lse float32 [B, Hq, N], and done int32 [B, Hkv], 0 before and after, unless ONE.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    held = (g[:, None] < G) & (d[None, :] < D)
    kind: tl.constexpr = cache_ptr.dtype.element_ty
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    end = tl.load(ends_ptr + b)
    low = tl.maximum(end - WINDOW, 0) if WINDOW else 0
    span = tl.cdiv(tl.cdiv(end - low, SPLITS), TOKENS) * TOKENS
    start = low + split * span
    stop = tl.minimum(start + span, end)
    if (split > 0) & (start >= end):
        return
    own = cache_ptr + h * head_stride
    if FETCH:
        fetch_block(own, table_ptr + b * P, start, stop, PAGE, TOKENS, D, DP)
    # Behind the queries: the new token's key, and its value, which stays as it is.
    head = tl.where(g < G, h * G + g, Hkv * g + h)
    q = turn_heads_of(
        heads_ptr + b * row_stride, weight_ptr, cos_ptr + b * D, sin_ptr + b * D, head, g <= G,
        (g[:, None] < G + 2) & (d[None, :] < D), part_stride, eps, D, DP, NORM, PARTS,
    ).to(kind)  # fmt: skip
    if (start < end) & (stop == end):
        slot = tl.load(slots_ptr + b).to(tl.int64)
        to = own + (2 * slot + g - G)[:, None] * D + d[None, :]
        tl.store(to, q, mask=((g == G) | (g == G + 1))[:, None] & (d[None, :] < D))
        tl.debug_barrier()  # other threads of this program read it
    best = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for at in range(start, stop, TOKENS):
        place = at + tl.arange(0, TOKENS)
        known = place < stop
        page = tl.load(table_ptr + b * P + place // PAGE, mask=known, other=0)
        slot = page.to(tl.int64) * PAGE + place % PAGE
        base = own + slot * (2 * D)
        held_kv = known[:, None] & (d[None, :] < D)
        k = tl.load(base[:, None] + d[None, :], mask=held_kv, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - higher)
        p = tl.exp2(scores - higher[:, None])
        v = tl.load(base[:, None] + D + d[None, :], mask=held_kv, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        best = higher

    rows = (b * Hkv + h) * G
    to = (rows + g)[:, None] * D + d[None, :]
    if ONE:
        if SINKS:
            sink = tl.load(sinks_ptr + h * G + g, mask=g < G, other=0.0) * 1.4426950408889634  # log2(e)
            total += tl.where(total > 0, tl.exp2(sink - best), 0.0)
        mean = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + to, mean.to(kind), mask=held)
    else:
        live = tl.cdiv(end - low, tl.maximum(span, 1)).to(tl.int32)
        mean = acc / tl.where(total > 0, total, 1.0)[:, None]
        lse = tl.where(total > 0, best + tl.log2(total), float("-inf"))
        if live <= 1:
            if SINKS:
                sink = tl.load(sinks_ptr + h * G + g, mask=g < G, other=0.0) * 1.4426950408889634
                mean /= (1.0 + tl.where(total > 0, tl.exp2(sink - lse), 0.0))[:, None]
            tl.store(out_ptr + to, mean.to(kind), mask=held)
        else:
            of_span = (rows + g) * SPLITS + split
            tl.store(lse_ptr + of_span, lse, mask=g < G)
            tl.store(partial_ptr + of_span[:, None] * D + d[None, :], mean, mask=held)
            tl.debug_barrier()
            # Whoever finds that all others are done sees what they left.
            if tl.atomic_add(done_ptr + b * Hkv + h, 1, sem="acq_rel") == live - 1:
                tl.store(done_ptr + b * Hkv + h, 0)
                join_live_spans(
                    partial_ptr, lse_ptr, sinks_ptr, out_ptr, rows, h * G, live, SPLITS,
                    G, GJ, D, DP, MOST, CHUNK, SINKS,
                )  # fmt: skip


def attend_whole(
    heads: Tensor,
    cos_ND: Tensor,
    sin_ND: Tensor,
    weight_GD: Tensor | None,
    eps: float,
    slots_B: Tensor,
    cache_HS2D: Tensor,
    table_BP: Tensor,
    ends_B: Tensor,
    done_X: Tensor,
    *,
    num_q: int,
    page_size: int,
    splits: int,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[B, Hq, D] in the cache's dtype: `rows.rotate` of heads with its store, then `decode.attend`.

    heads: [B, X], or float32 parts [Q, B, X] whose sum is meant, X = (Hq + 2 Hkv) D, rows contiguous. cos and
    sin: [B, D], contiguous; weight: [Hq + Hkv, D] of norms by head, or None. slots: int32 or int64 [B], of
    the token of each row, which its end counts; no two rows are of the same sequence. done: int32, at least
    [B Hkv], 0 before and after. splits: a power of two up to MOST_SPLITS. Other arguments as of
    `decode.attend`. Raises ValueError for more than `decode.ROWS` rows, more splits or too few counters.
    """
    B, Hkv, D = heads.shape[-2], len(cache_HS2D), cache_HS2D.shape[-1]
    if B > ROWS or splits > MOST_SPLITS:
        raise ValueError(f"{B} rows in {splits} splits: at most {ROWS} and {MOST_SPLITS} in one launch")
    if splits > 1 and len(done_X) < B * Hkv:
        raise ValueError(f"{len(done_X)} counters for {B} rows of {Hkv} heads of keys")
    out_BHD = torch.empty(B, num_q, D, dtype=cache_HS2D.dtype, device=heads.device)
    if not B:
        return out_BHD
    G, DP = num_q // Hkv, max(16, triton.next_power_of_2(D))
    early = launches_early(heads.device)
    partial = lse = out_BHD
    if splits > 1:
        partial = torch.empty(B, num_q, splits, D, dtype=torch.float32, device=heads.device)
        lse = torch.empty(B, num_q, splits, dtype=torch.float32, device=heads.device)
    joined = triton.next_power_of_2(G)
    crowded = {"maxnreg": REGISTERS} if splits == 1 and DP <= 128 else {}
    rotate_store_attend[(B, Hkv, splits)](
        heads, cos_ND if weight_GD is None else weight_GD, cos_ND, sin_ND, slots_B, cache_HS2D, table_BP,
        ends_B, cos_ND if sinks_H is None else sinks_H, partial, lse, done_X, out_BHD,
        heads.stride(-2), heads.stride(0) if heads.dim() == 3 else 0, cache_HS2D.stride(0),
        scale * math.log2(math.e), eps, table_BP.shape[1], Hkv, splits,
        G, max(16, triton.next_power_of_2(G + 2)), joined, D, DP, page_size, BLOCK, window,
        weight_GD is not None, len(heads) if heads.dim() == 3 else 1, splits == 1, MOST_SPLITS,
        max(1, min(MOST_SPLITS, JOINED // (joined * DP))), sinks_H is not None, early, early,
        launch_pdl=early, **crowded,
    )  # fmt: skip
    return out_BHD
