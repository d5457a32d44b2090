"""Attention of one query token per sequence over its paged context (Triton).

A context is cut into `splits` spans that programs attend to apart, each with the softmax of its own span; a
second kernel joins them, and sinks, by their log-sum-exp (FlashDecoding); a context that is one span needs
none. Both begin before their predecessors have ended (programmatic dependent launch). All sizes but the batch
are read on the device, so a captured graph serves contexts of any length. Every query head of a KV head is
one row of the products: keys and values are read once for all of them.

Legend: B sequences, Hq/Hkv query/KV heads, G = Hq/Hkv, GP its power of two of at least 16, D head size,
DP its power of two, S slots of the cache, P pages of a row of the table, N splits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early

BLOCK, WIDE = 64, 128  # tokens of a context at a time; see `block_of` and `cut_of`
FEW = 2, 4  # spans; see `cut_of`
ROWS = 256  # of one launch: bounds the spans' partial results
JOINED = 4096  # values that a program joins: few requests are cut into many spans, and have few programs


@triton.jit
def spans_of(end, SPLITS, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Of a context of `end` tokens its first, how many a span has, and how many spans have any."""
    low = tl.maximum(end - WINDOW, 0) if WINDOW else 0
    span = tl.cdiv(tl.cdiv(end - low, SPLITS), TOKENS) * TOKENS
    return low, span, tl.cdiv(end - low, tl.maximum(span, 1))


@triton.jit
def load_tile(
    cache_ptr, pages_ptr, first, stop, d, known_d, D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr
):
    """Values d of keys and values [TOKENS, DP] of a head from token `first` on, both on their way before
    either is used; and which tokens are before `stop`. pages_ptr: of the context."""
    place = first + tl.arange(0, TOKENS)
    known = place < stop
    page = tl.load(pages_ptr + place // PAGE, mask=known, other=0)
    base = cache_ptr + (page.to(tl.int64) * PAGE + place % PAGE) * (2 * D)
    held = known[:, None] & known_d[None, :]
    k = tl.load(base[:, None] + d[None, :], mask=held, other=0.0)
    return k, tl.load(base[:, None] + D + d[None, :], mask=held, other=0.0), known


@triton.jit
def weigh(best, total, acc, q, k, v, known, scale):
    """The softmax so far, its highest scores [GP], sums [GP] and weighted values [GP, DP], and a tile's."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(known[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - higher)
    p = tl.exp2(scores - higher[:, None])
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit
def leave(
    best, total, acc, sinks_ptr, out_ptr, partial_ptr, lse_ptr, rows, split, SPLITS, used, once, d, held,
    D: tl.constexpr, ONE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """What a span gives, for `join_spans`; of a context that is one span out itself. sinks_ptr: of rows [GP];
    once: which rows count."""
    if ONE or used <= 1:
        if SINKS:
            sink = tl.load(sinks_ptr, mask=once, other=0.0) * 1.4426950408889634  # log2(e)
            total += tl.where(total > 0, tl.exp2(sink - best), 0.0)
        mean = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + rows[:, None] * D + d[None, :], mean.to(out_ptr.dtype.element_ty), mask=held)
    else:
        to = rows * SPLITS + split
        tl.store(lse_ptr + to, best + tl.log2(total), mask=once)
        tl.store(partial_ptr + to[:, None] * D + d[None, :], acc / total[:, None], mask=held)


@triton.jit(do_not_specialize=["P", "SPLITS"])
def attend_span(
    q_ptr, cache_ptr, table_ptr, ends_ptr, sinks_ptr, out_ptr, partial_ptr, lse_ptr,
    scale, head_stride, P, Hkv, SPLITS,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, ONE: tl.constexpr,
    SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial float32 [B, Hq, N, D] and lse float32 [B, Hq, N] (base 2) of one span and KV head; of a context
    that is one span out [B, Hq, D], with the share of sinks float32 [Hq] if SINKS. Spans without tokens give
    nothing, unless all are: then out is 0. ONE: there is one span of each.

    q [B, Hq, D]; cache [Hkv, S, 2, D], keys before values; table [B, P] pages; ends [B] context lengths,
    0 for rows that are padding. Ends and the first pages are read before the kernel in front has ended: they
    are older than that (`rows.rotate_heads` lets this begin when all before it has). `scale` includes
    log2(e). WINDOW: of so many last tokens of a context; 0: of all.
    """
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    rows = b * Hkv * G + h * G + g
    held = (g[:, None] < G) & (d[None, :] < D)
    end = tl.load(ends_ptr + b)
    low, span, used = spans_of(end, SPLITS, TOKENS, WINDOW)
    start = low + split * span
    stop = tl.minimum(start + span, end)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if split >= tl.maximum(used, 1):
        return
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :], mask=held, other=0.0)
    best = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    for at in range(start, stop, TOKENS):
        k, v, known = load_tile(
            cache_ptr + h * head_stride, table_ptr + b * P, at, stop, d, d < D, D, PAGE, TOKENS
        )
        best, total, acc = weigh(best, total, acc, q, k, v, known, scale)
    leave(
        best, total, acc, sinks_ptr + h * G + g, out_ptr, partial_ptr, lse_ptr, rows, split, SPLITS, used,
        g < G, d, held, D, ONE, SINKS,
    )  # fmt: skip


@triton.jit
def join_spans(
    partial_ptr, lse_ptr, sinks_ptr, ends_ptr, out_ptr, Hq,
    D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, D]: the spans' results weighted by their share of the softmax; 0 where all are empty.

    A program joins DP columns of a row, whose number is the grid's second axis.
    SINKS: sinks float32 [Hq] have a share too, of nothing. TOKENS, WINDOW: of `attend_span`, which leaves out
    empty spans and has joined single ones; 0: all have a result.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SPLITS)
    d = tl.arange(0, DP)
    if DP < D:
        d += tl.program_id(1) * DP
    used = SPLITS
    if TOKENS:
        _, _, used = spans_of(tl.load(ends_ptr + row // Hq), SPLITS, TOKENS, WINDOW)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if TOKENS:
        if used <= 1:
            return
    lse = tl.load(lse_ptr + row * SPLITS + n, mask=n < used, other=float("-inf"))
    held = (n[:, None] < used) & (d[None, :] < D)
    spans = tl.load(partial_ptr + (row * SPLITS + n)[:, None] * D + d[None, :], mask=held, other=0.0)
    best = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + row % Hq) * 1.4426950408889634  # log2(e)
        best = tl.maximum(best, sink)
    weight = tl.where(lse > float("-inf"), tl.exp2(lse - tl.where(best > float("-inf"), best, 0.0)), 0.0)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(sink - best)
    out = tl.sum(spans * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


class Cut(NamedTuple):
    """Of contexts: into so many spans, of which a program reads `block` tokens at a time."""

    splits: int
    block: int


def block_of(head_dim: int, itemsize: int) -> int:
    """Tokens at a time, whatever the batch. With heads of 64 values 128 requests of 1,024 tokens took 0.80
    of the time by WIDE on an H200, and 16 of 8,192 took 0.56 (docs/notes/attention.md)."""
    return WIDE if head_dim == 64 and itemsize == 2 else BLOCK


def wanted_spans(pairs: int, processors: int) -> int:
    """The power of two that gives each of `processors` two programs. pairs: of a request and a KV head."""
    return 1 << (max(1, 2 * processors // pairs).bit_length() - 1)


def cut_of(
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    max_context: int,
    window: int,
    processors: int,
) -> Cut:
    """Into as many spans, a power of two, as give every processor two programs, where contexts can be that
    long.

    With heads of 128 values a multiprocessor holds two programs of WIDE, and four of BLOCK. So 16 requests
    with four KV heads, in four spans, took 0.74 of the time by WIDE at 8,192 tokens and 0.89 at 1,024; one
    took 1.36 and 128, in one span, 1.06. Windows have not been measured so."""
    block = block_of(head_dim, itemsize)
    wanted = wanted_spans(batch * num_kv_heads, processors)
    if head_dim == 128 and itemsize == 2 and not window and wanted in FEW:
        block = WIDE
    most = max(1, min(max_context, window or max_context) // (4 * block))
    return Cut(1 << (min(wanted, most, 64).bit_length() - 1), block)


def attend(
    q_BHD: Tensor,
    cache_HS2D: Tensor,
    table_BP: Tensor,
    ends_B: Tensor,
    *,
    page_size: int,
    cut: Cut,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
    out_BHD: Tensor | None = None,
) -> Tensor:
    """[B, Hq, D] in q's dtype: each row attends to the first ends[b] tokens of its pages.

    cut: of contexts, see `cut_of`. scale: of scores. window: to the last so many of them only; 0: to all.
    sinks: float32 [Hq], contiguous. q contiguous; cache [Hkv, S, 2, D] with contiguous slots; table int32 or
    int64 [B, P], contiguous; ends int32 or int64 [B], 0 for a row that is padding: it gives 0. out:
    contiguous, to be filled and returned.
    """
    B, Hq, D = q_BHD.shape
    out_BHD = torch.empty_like(q_BHD) if out_BHD is None else out_BHD
    if B > ROWS:
        split = (x.split(ROWS) for x in (q_BHD, table_BP, ends_B, out_BHD))
        for q, table, ends, out in zip(*split, strict=True):
            attend(
                q, cache_HS2D, table, ends, page_size=page_size, cut=cut, scale=scale, window=window,
                sinks_H=sinks_H, out_BHD=out,
            )  # fmt: skip
        return out_BHD
    if not B:
        return out_BHD
    Hkv = len(cache_HS2D)
    G, DP, splits = Hq // Hkv, max(16, triton.next_power_of_2(D)), cut.splits
    early = launches_early(q_BHD.device)
    sinks = q_BHD if sinks_H is None else sinks_H
    partial, lse = partial_results(out_BHD, splits)
    attend_span[(B, Hkv, splits)](
        q_BHD, cache_HS2D, table_BP, ends_B, sinks, out_BHD, partial, lse,
        scale * math.log2(math.e), cache_HS2D.stride(0), table_BP.shape[1], Hkv, splits,
        G, max(16, triton.next_power_of_2(G)), D, DP, page_size, cut.block, window, splits == 1,
        sinks_H is not None, early, launch_pdl=early,
    )  # fmt: skip
    if splits > 1:
        join(partial, lse, sinks_H, ends_B, out_BHD, cut, window)
    return out_BHD


def partial_results(out_BHD: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Memory for what spans give: results [B, Hq, N, D] and log-sum-exps [B, Hq, N]; none for one span."""
    if splits == 1:
        return out_BHD, out_BHD
    B, Hq, D = out_BHD.shape
    partial = torch.empty(B, Hq, splits, D, dtype=torch.float32, device=out_BHD.device)
    return partial, torch.empty(B, Hq, splits, dtype=torch.float32, device=out_BHD.device)


def join(
    partial: Tensor,
    lse: Tensor,
    sinks_H: Tensor | None,
    ends_B: Tensor,
    out_BHD: Tensor,
    cut: Cut,
    window: int,
) -> None:
    """Fill out with what the spans of contexts gave; see `join_spans`."""
    B, Hq, D = out_BHD.shape
    early = launches_early(out_BHD.device)
    DP = max(16, triton.next_power_of_2(D))
    columns = min(DP, max(16, JOINED // cut.splits))  # by nothing of the batch, for --deterministic
    join_spans[(B * Hq, triton.cdiv(D, columns))](
        partial, lse, out_BHD if sinks_H is None else sinks_H, ends_B, out_BHD, Hq, D, columns, cut.splits,
        sinks_H is not None, cut.block, window, early, launch_pdl=early,
    )  # fmt: skip
