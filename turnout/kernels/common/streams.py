"""What connects several residual streams to a block, in two launches (Triton): see models/streams.py.

Composed by torch it is about a hundred, of which Sinkhorn's iterations are most. The first kernel adds what
the last block gave to the streams and multiplies parts of them by fn; the second sums the parts up, follows
the iterations on the S x S numbers of a token in registers, and mixes. The input of a block is normed here
too: how long a sum of streams is follows from their products with each other, which the first kernel makes.

Legend: N tokens, S streams, H hidden, X = S H, C = S (S + 2) rows of fn, CP a power of two from it on, B
parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early
from turnout.kernels.common.parts import count_parts

ROWS, COLUMNS = 16, 32  # of a program that multiplies: tokens, and columns of each stream
MIXED = 512  # columns of a stream that are mixed at a time
MANY = 512  # tokens, from which on a program mixes all columns of one
SOME, STEPS = 32, 4  # tokens, from which on a program multiplies as many times the columns, for fewer parts
TWICE = range(32, 81)  # tokens, of which a program mixes two blocks of columns
FEWER, FEWER_STEPS = range(64, 81), 2  # tokens, of which a program multiplies fewer times the columns


class Cut(NamedTuple):
    """How the work is cut up.

    steps: a program multiplies as many times COLUMNS of each stream, with so many warps. blocks: of MIXED
    columns that a program mixes, `mixing` its warps.
    """

    steps: int
    blocks: int
    warps: int = 4
    mixing: int = 4


def cut_of(tokens: int, hidden: int) -> Cut:
    """Of so many tokens. In benchmarks/results/compressed-layers-nvidia-h200-2026-11-27.json, four streams of
    4,096 columns, 32 tokens took 27 us so, and 39 to 40 with one step and one block; 64 tokens 37 us, and 39
    to 41 with four steps and one block; 128 tokens 44 to 49 us, 57 to 60 with one step, and the same with two
    blocks. Lines through 64 and 128 tokens cross at 82 and, where two parts are added, 89."""
    whole = triton.cdiv(hidden, MIXED)
    blocks = whole if tokens > MANY else min(2, whole) if tokens in TWICE else 1
    steps = FEWER_STEPS if tokens in FEWER else STEPS if tokens >= SOME else 1
    return Cut(steps, blocks)


@triton.jit(do_not_specialize=["N"])
def stream_products(
    x_ptr, post_ptr, y_ptr, fn_ptr, total_ptr, parts_ptr, N, H, B,
    S: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, ADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """total [N, S, H] = x + post [N, S] * y [N, H], the sum of ADDED parts; x where there are none, and not
    stored. parts float32 [N, B, CP + S S]: of STEPS times COLUMNS of each stream, products by fn [C, X], and
    of streams with each other (the upper half)."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * (COLUMNS * STEPS) + tl.arange(0, COLUMNS)
    c = tl.arange(0, CP)
    fn = _rows_of_fn(fn_ptr, first, c, H, S, C)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    known = n < N
    products = tl.zeros([ROWS, CP], tl.float32)
    pairs = ()
    for _ in tl.static_range(S * (S + 1) // 2):
        pairs += (tl.zeros([ROWS], tl.float32),)  # type: ignore[assignment]
    for step in tl.static_range(STEPS):
        h = first + step * COLUMNS
        if step > 0:
            fn = _rows_of_fn(fn_ptr, h, c, H, S, C)
        held = known[:, None] & (h < H)[None, :]
        y = tl.zeros([ROWS, COLUMNS], tl.float32)
        for part in tl.static_range(ADDED):
            y += tl.load(y_ptr + (part * N + n[:, None]) * H + h[None, :], mask=held, other=0.0).to(
                tl.float32
            )
        streams = ()
        for j in tl.static_range(S):
            at = (n[:, None] * S + j) * H + h[None, :]
            x = tl.load(x_ptr + at, mask=held, other=0.0)
            if ADDED > 0:
                post = tl.load(post_ptr + n * S + j, mask=known, other=0.0)
                x = (x.to(tl.float32) + post[:, None] * y).to(x_ptr.dtype.element_ty)
                tl.store(total_ptr + at, x, mask=held)
            x = x.to(tl.float32)
            products = tl.dot(x, fn[j], products, input_precision="tf32x3")
            streams += (x,)  # type: ignore[assignment]
        sums = ()
        for j in tl.static_range(S):
            for i in tl.static_range(j, S):
                before = pairs[j * S - j * (j - 1) // 2 + i - j]  # type: ignore[var-annotated]
                sums += (before + tl.sum(streams[j] * streams[i], 1),)  # type: ignore[assignment]
        pairs = sums
    to = parts_ptr + (n * B + tl.program_id(1)) * (CP + S * S)
    tl.store(to[:, None] + c[None, :], products, mask=known[:, None])
    for j in tl.static_range(S):
        for i in tl.static_range(j, S):
            tl.store(to + CP + j * S + i, pairs[j * S - j * (j - 1) // 2 + i - j], mask=known)


@triton.jit
def _rows_of_fn(fn_ptr, h, c, H, S: tl.constexpr, C: tl.constexpr):
    """float32 [COLUMNS, CP] of each stream."""
    held = (h < H)[:, None] & (c < C)[None, :]
    at = fn_ptr + c[None, :] * (S * H) + h[:, None]
    fn = ()
    for j in tl.static_range(S):
        fn += (tl.load(at + j * H, mask=held, other=0.0),)  # type: ignore[assignment]
    return fn


@triton.jit
def stream_mixture(
    total_ptr, parts_ptr, base_ptr, scale_ptr, gain_ptr, x_ptr, post_ptr, mixed_ptr, H, B, eps, norm_eps,
    gain_eps,
    S: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BP: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [N, H], normed with gain [H], and, but of the LAST connection, float32 post [N, S] and mixed
    [N, S, H], of total [N, S, H] and the parts of its products."""
    n = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BP)
    j = tl.arange(0, S)
    pairs = j[:, None] * S + j[None, :]
    base_pre, scale_pre = tl.load(base_ptr + j), tl.load(scale_ptr)
    if not LAST:
        base_post, scale_post = tl.load(base_ptr + S + j), tl.load(scale_ptr + 1)
        base_mix, scale_mix = tl.load(base_ptr + 2 * S + pairs), tl.load(scale_ptr + 2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = parts_ptr + (n * B + b) * (CP + S * S)
    known = (b < B)[:, None]
    of_pairs = part[:, None, None] + pairs[None, :, :]
    ordered = tl.minimum(j[:, None], j[None, :]) * S + tl.maximum(j[:, None], j[None, :])
    between = part[:, None, None] + CP + ordered[None, :, :]
    between = tl.sum(tl.load(between, mask=known[:, :, None], other=0.0), 0)
    squares = tl.sum(tl.sum(tl.where(j[:, None] == j[None, :], between, 0.0), 1), 0)
    unit = tl.rsqrt(squares / (S * H) + norm_eps)
    pre = tl.sum(tl.load(part[:, None] + j[None, :], mask=known, other=0.0), 0) * unit
    pre = tl.sigmoid(pre * scale_pre + base_pre) + eps
    square = tl.sum(tl.sum(between * pre[:, None], 0) * pre, 0)
    scale = tl.rsqrt(tl.maximum(square, 0.0) / H + gain_eps)
    if not LAST:
        post = tl.sum(tl.load(part[:, None] + S + j[None, :], mask=known, other=0.0), 0) * unit
        post = 2 * tl.sigmoid(post * scale_post + base_post)
        mix = tl.sum(tl.load(of_pairs + 2 * S, mask=known[:, :, None], other=0.0), 0) * unit
        mix = mix * scale_mix + base_mix
        mix = tl.exp(mix - tl.max(mix, 1)[:, None])
        mix = mix / tl.sum(mix, 1)[:, None] + eps
        mix = mix / (tl.sum(mix, 0) + eps)[None, :]
        for _ in range(ITERATIONS - 1):
            mix = mix / (tl.sum(mix, 1) + eps)[:, None]
            mix = mix / (tl.sum(mix, 0) + eps)[None, :]
        if tl.program_id(1) == 0:
            tl.store(post_ptr + n * S + j, post)
    for i in tl.static_range(BLOCKS):
        h = (tl.program_id(1) * BLOCKS + i) * BLOCK + tl.arange(0, BLOCK)
        at = n * S * H + j[:, None] * H + h[None, :]
        held = (h < H)[None, :]
        streams = tl.load(total_ptr + at, mask=held, other=0.0).to(tl.float32)
        gain = tl.load(gain_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        x = tl.sum(pre[:, None] * streams, 0) * scale * gain
        tl.store(x_ptr + n * H + h, x.to(x_ptr.dtype.element_ty), mask=h < H)
        if not LAST:
            mixed = tl.sum(mix[:, :, None] * streams[:, None, :], 0)
            tl.store(mixed_ptr + at, mixed.to(mixed_ptr.dtype.element_ty), mask=held)


def connect(
    x_NSH: Tensor,
    added: tuple[Tensor, Tensor] | None,
    fn_CX: Tensor,
    base_C: Tensor,
    scale_3: Tensor,
    gain_H: Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    gain_eps: float,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(the input [N, H] of a block, normed, float32 post [N, S], the streams [N, S, H] mixed).

    added: to the streams before: float32 post [N, S], and y [N, H] or parts [P, N, H], whose sum is meant.
    fn, base, scale: float32, contiguous. gain: of the norm, whose epsilon is gain_eps. S is a power of two.
    cut: instead of what suits N.
    """
    N, S, H = x_NSH.shape
    post_NS = torch.empty(N, S, dtype=torch.float32, device=x_NSH.device)
    mixed_NSH = torch.empty(N, S, H, dtype=x_NSH.dtype, device=x_NSH.device)
    every, kept = (eps, norm_eps, gain_eps), (post_NS, mixed_NSH)
    _, out_NH = _connected(x_NSH, added, fn_CX, base_C, scale_3, gain_H, every, iterations, kept, cut)
    return out_NH, post_NS, mixed_NSH


def connect_last(
    x_NSH: Tensor,
    added: tuple[Tensor, Tensor] | None,
    fn_SX: Tensor,
    base_S: Tensor,
    scale_1: Tensor,
    gain_H: Tensor,
    *,
    eps: float,
    norm_eps: float,
    gain_eps: float,
) -> tuple[Tensor, Tensor]:
    """(the streams [N, S, H] with what is added, their sum [N, H], normed) behind the last layer; see
    `connect`."""
    return _connected(x_NSH, added, fn_SX, base_S, scale_1, gain_H, (eps, norm_eps, gain_eps), 0, None)


def _connected(
    x_NSH: Tensor,
    added: tuple[Tensor, Tensor] | None,
    fn_CX: Tensor,
    base_C: Tensor,
    scale: Tensor,
    gain_H: Tensor,
    eps: tuple[float, float, float],
    iterations: int,
    kept: tuple[Tensor, Tensor] | None,
    cut: Cut | None = None,
) -> tuple[Tensor, Tensor]:
    """(total [N, S, H], x [N, H]) of `stream_mixture`. kept: its post and mixed, which are written. cut:
    instead of `cut_of`."""
    N, S, H = x_NSH.shape
    x_NSH, C = x_NSH.contiguous(), len(fn_CX)
    cut = cut or cut_of(N, H)
    CP, B = max(16, triton.next_power_of_2(C)), triton.cdiv(H, COLUMNS * cut.steps)
    post_in, y = (part.contiguous() for part in added) if added else (scale, x_NSH)
    parts = 0 if added is None else count_parts(y)
    total_NSH, out_NH = torch.empty_like(x_NSH) if added else x_NSH, x_NSH.new_empty(N, H)
    parts_NBC = torch.empty(N, B, CP + S * S, dtype=torch.float32, device=x_NSH.device)
    post_NS, mixed_NSH = kept or (out_NH, out_NH)
    early = launches_early(x_NSH.device)
    if N:
        grid = triton.cdiv(N, ROWS), B
        stream_products[grid](
            x_NSH, post_in, y, fn_CX, total_NSH, parts_NBC, N, H, B,
            S, C, CP, parts, ROWS, COLUMNS, cut.steps, early, num_warps=cut.warps, launch_pdl=early,
        )  # fmt: skip
        stream_mixture[(N, triton.cdiv(H, MIXED * cut.blocks))](
            total_NSH, parts_NBC, base_C, scale, gain_H, out_NH, post_NS, mixed_NSH, H, B, *eps,
            S, C, CP, triton.next_power_of_2(B), iterations, MIXED, cut.blocks, kept is None, early,
            num_warps=cut.mixing, launch_pdl=early,
        )  # fmt: skip
    return total_NSH, out_NH
