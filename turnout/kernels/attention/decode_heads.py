"""Attention of one query token per sequence from what its projection gives (Triton): heads are normed and
rotated, and its key and value stored, by the programs that attend with them.

In steps of few tokens the launch of `rows.rotate_heads` and the wait for what it wrote took longer than its
work. Here each program turns the queries of its KV head itself, and the first keys and values of its span are
on their way while the projection is still computed. No two rows may be of one sequence: a program reads the
keys of older tokens, and takes the newest from its registers.

Legend: as decode.py; P parts of a product (split_gemm.py), X values of a row of it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.attention.decode import (
    BLOCK,
    FEW,
    WIDE,
    Cut,
    join,
    leave,
    load_tile,
    partial_results,
    spans_of,
    wanted_spans,
    weigh,
)
from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.parts import count_parts, load_sum
from turnout.kernels.common.rows import load_halves, turn

# Rows times KV heads, up to which this takes less by programs of eight warps: Qwen3-30B's decode steps on an
# H200 (docs/notes/serving.md), in ms: 16 requests of 190 tokens 4.60 rather than 4.96, 64 6.90 than 6.99;
# with 128 requests, 512 programs, 7.64 rather than 7.60, with 256 10.2 than 9.7.
PROGRAMS = 256


@triton.jit
def _turned(
    at, gains, cos, sin, mask, part_stride, eps, kind: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Both halves [., HP] of heads `at` [., HP], normed and rotated, as `kind`."""
    low = load_sum(at, part_stride, mask, PARTS)
    high = load_sum(at + HALF, part_stride, mask, PARTS)
    low, high = turn(low, high, gains, cos, sin, eps, HALF, NORM)
    return low.to(kind), high.to(kind)


@triton.jit
def _load_gains(
    weight_ptr, h, Hkv, G: tl.constexpr, GQ: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Halves of the norm's weight, of KV head h's queries [GQ, HP] and of its key [1, HP]."""
    gains = (0.0, 0.0)
    key_gains = (0.0, 0.0)
    if NORM:
        g = tl.arange(0, GQ)[:, None]
        j = tl.arange(0, HP)[None, :]
        gains = load_halves(weight_ptr + (h * G + g) * HALF * 2 + j, (g < G) & (j < HALF), HALF)
        key_gains = load_halves(weight_ptr + (Hkv * G + h) * HALF * 2 + j, j < HALF, HALF)
    return gains, key_gains


@triton.jit
def _turned_heads(
    heads_ptr, cos_ptr, sin_ptr, gains, h, Hkv, newest, part_stride, eps, kind: tl.constexpr,
    G: tl.constexpr, GQ: tl.constexpr, HP: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Halves of KV head h's queries [GQ, HP], and of its key [1, HP] if `newest`, of a row at heads_ptr."""
    g = tl.arange(0, GQ)[:, None]
    j = tl.arange(0, HP)[None, :]
    cos = load_halves(cos_ptr + j, j < HALF, HALF)
    sin = load_halves(sin_ptr + j, j < HALF, HALF)
    at, held = heads_ptr + (h * G + g) * HALF * 2 + j, (g < G) & (j < HALF)
    q = _turned(at, gains[0], cos, sin, held, part_stride, eps, kind, HALF, NORM, PARTS)
    at, held = heads_ptr + (Hkv * G + h) * HALF * 2 + j, (j < HALF) & newest
    return q, _turned(at, gains[1], cos, sin, held, part_stride, eps, kind, HALF, NORM, PARTS)


@triton.jit
def _columns(D: tl.constexpr, DP: tl.constexpr):
    """Columns [DP] of a head, both halves padded to a power of two, and which exist."""
    d = tl.arange(0, DP)
    if D == DP:
        return d, d < D
    else:
        j = d % (DP // 2)
        return d // (DP // 2) * (D // 2) + j, j < D // 2


@triton.jit
def _store_newest(to_ptr, key, value, d, known_d, newest, HP: tl.constexpr, HALF: tl.constexpr):
    j = tl.arange(0, HP)[None, :]
    tl.store(to_ptr + j, key[0], mask=(j < HALF) & newest)
    tl.store(to_ptr + HALF + j, key[1], mask=(j < HALF) & newest)
    tl.store(to_ptr + 2 * HALF + d[None, :], value, mask=known_d[None, :] & newest)


@triton.jit
def _begin(q, key, value, newest, scale, GQ: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr):
    """Queries [GP, DP], and the softmax of the newest token alone: highest scores, sums, weighted values. A
    number that no score is lower than keeps spans without it, and rows without tokens, free of NaN."""
    score = tl.sum(q[0].to(tl.float32) * key[0].to(tl.float32), 1)
    score += tl.sum(q[1].to(tl.float32) * key[1].to(tl.float32), 1)
    score = tl.broadcast_to(score[None, :], (GP // GQ, GQ)).reshape(GP) * scale
    both = tl.join(q[0], q[1]).permute(0, 2, 1).reshape(1, GQ, DP)
    both = tl.broadcast_to(both, (GP // GQ, GQ, DP)).reshape(GP, DP)
    total = tl.zeros([GP], tl.float32) + tl.where(newest, 1.0, 0.0)
    acc = tl.zeros([GP, DP], tl.float32) + value.to(tl.float32)
    return both, tl.where(newest, score, -1e30), total, acc


@triton.jit(do_not_specialize=["N", "P", "SPLITS"])
def attend_heads(
    heads_ptr, weight_ptr, cos_ptr, sin_ptr, slots_ptr, cache_ptr, table_ptr, ends_ptr, sinks_ptr,
    out_ptr, partial_ptr, lse_ptr,
    scale, eps, N, row_stride, head_stride, P, Hkv, SPLITS,
    G: tl.constexpr, GQ: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, ONE: tl.constexpr,
    SINKS: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `decode.attend_span`, of heads [N, X] that are neither normed nor rotated: Hq of queries, Hkv of
    keys, Hkv of values; the sum of PARTS, N rows apart. What is left of keys and values goes to
    cache[:, slots[b]] if ends[b] is not 0.

    weight [Hq + Hkv, D] if NORM; cos, sin [N, D], sin with the rotation's sign. GQ: G's power of two. Ends,
    pages, and what the cache holds of older tokens are read before the kernel in front has ended: kernels
    that wait for those in front of them have written them.
    """
    HALF: tl.constexpr = D // 2
    HP: tl.constexpr = DP // 2
    kind: tl.constexpr = cache_ptr.dtype.element_ty
    b = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    once = tl.arange(0, GP) < G  # queries are there more than once, as `tl.dot` wants 16
    d, known_d = _columns(D, DP)
    end = tl.load(ends_ptr + b)
    low, span, used = spans_of(end, SPLITS, TOKENS, WINDOW)
    start = low + split * span
    stop = tl.minimum(start + span, end)
    newest = (start < end) & (stop == end)  # a context's last token, which this row is
    older = tl.minimum(stop, end - 1)
    cache = cache_ptr + h * head_stride
    pages = table_ptr + b * P
    k, v, known = load_tile(cache, pages, start, older, d, known_d, D, PAGE, TOKENS)
    gains = _load_gains(weight_ptr, h, Hkv, G, GQ, HP, HALF, NORM)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if split >= tl.maximum(used, 1):
        return
    part_stride = N.to(tl.int64) * row_stride
    row = heads_ptr + b * row_stride
    q, key = _turned_heads(
        row, cos_ptr + b * D, sin_ptr + b * D, gains, h, Hkv, newest, part_stride, eps, kind, G, GQ, HP,
        HALF, NORM, PARTS,
    )  # fmt: skip
    at = row + (Hkv * (G + 1) + h) * D + d[None, :]
    value = load_sum(at, part_stride, known_d[None, :] & newest, PARTS).to(kind)
    to = cache + 2 * D * tl.load(slots_ptr + b).to(tl.int64)
    _store_newest(to, key, value, d, known_d, newest, HP, HALF)
    q, best, total, acc = _begin(q, key, value, newest, scale, GQ, GP, DP)
    best, total, acc = weigh(best, total, acc, q, k, v, known, scale)
    for first in range(start + TOKENS, older, TOKENS):
        k, v, known = load_tile(cache, pages, first, older, d, known_d, D, PAGE, TOKENS)
        best, total, acc = weigh(best, total, acc, q, k, v, known, scale)
    rows = (b * Hkv + h) * G + tl.arange(0, GP) % GQ
    leave(
        best, total, acc, sinks_ptr + rows % (Hkv * G), out_ptr, partial_ptr, lse_ptr, rows, split, SPLITS,
        used, once, d, once[:, None] & known_d[None, :], D, ONE, SINKS,
    )  # fmt: skip


class Programs(NamedTuple):
    """How contexts are cut for them, and what each has. stages: of its loop; registers: the most of a thread,
    if there is a bound."""

    cut: Cut
    warps: int = 8
    stages: int = 3
    registers: int | None = None


def programs_of(
    cut: Cut,
    batch: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    window: int,
    processors: int,
) -> Programs | None:
    """Those that take least; None where kernels that rotate and then attend take less. cut: of
    `decode.cut_of`.

    With heads of 128 values, in us a layer on an H200 (docs/notes/attention.md), for 16, 32 and 128 requests
    of 1,100 tokens: 18, 28 and 75, rather than 27, 36 and 78 by one shape of program for all. What takes less
    alone may not in a step, whose next kernels find no room to begin: one request of 200 tokens by spans of
    128 takes 1.87 ms rather than 1.66, of 64 tokens in a tile of 128 1.66 rather than 1.59, 64 of them in
    five stages 6.74 rather than 6.58. Others have not been measured so.
    """
    pairs = batch * num_kv_heads
    if head_dim != 128 or itemsize != 2 or window:
        return Programs(cut) if pairs <= PROGRAMS else None
    if pairs > 2 * processors:
        return Programs(Cut(1, BLOCK), 4, registers=128)  # a multiprocessor holds four
    wanted = wanted_spans(pairs, processors)
    if cut.splits == 1 and wanted in (2, 4, 8):  # one on a multiprocessor
        return Programs(Cut(1, WIDE))
    if wanted in FEW:
        return Programs(Cut(2, BLOCK), stages=5)
    return Programs(Cut(cut.splits, BLOCK))


def attend(
    heads: Tensor,
    num_q: int,
    num_k: int,
    cos_BD: Tensor,
    sin_BD: Tensor,
    weight_GD: Tensor | None,
    eps: float,
    cache_HS2D: Tensor,
    slots_B: Tensor,
    table_BP: Tensor,
    ends_B: Tensor,
    *,
    page_size: int,
    programs: Programs,
    scale: float,
    window: int = 0,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[B, Hq, D] in the cache's dtype, as `rows.rotate` with `store` and then `decode.attend` give it.

    Each row is of a sequence of its own. heads to eps: as of `rows.rotate`. slots: int64 [B]; table, ends and
    the others as of `decode.attend`, with the token of the step counted. programs: see `programs_of`.
    """
    B, D = cos_BD.shape
    out_BHD = torch.empty(B, num_q, D, dtype=cache_HS2D.dtype, device=cache_HS2D.device)
    if not B:
        return out_BHD
    G, (splits, block) = num_q // num_k, programs.cut
    GQ, early = triton.next_power_of_2(G), launches_early(out_BHD.device)
    partial, lse = partial_results(out_BHD, splits)
    attend_heads[(B, num_k, splits)](
        heads, out_BHD if weight_GD is None else weight_GD, cos_BD, sin_BD, slots_B,
        cache_HS2D, table_BP, ends_B, out_BHD if sinks_H is None else sinks_H, out_BHD, partial, lse,
        scale * math.log2(math.e), eps, B, heads.stride(-2), cache_HS2D.stride(0),
        table_BP.shape[1], num_k, splits,
        G, GQ, max(16, GQ), D, max(16, triton.next_power_of_2(D)), page_size, block, window,
        splits == 1, sinks_H is not None, weight_GD is not None, count_parts(heads), early,
        num_warps=programs.warps, num_stages=programs.stages, maxnreg=programs.registers, launch_pdl=early,
    )  # fmt: skip
    if splits > 1:
        join(partial, lse, sinks_H, ends_B, out_BHD, programs.cut, window)
    return out_BHD
