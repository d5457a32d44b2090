"""What connects several residual streams to a block, in two launches (Triton): see models/streams.py.

Composed by torch it is about a hundred, of which Sinkhorn's iterations are most. The first kernel adds what
the last block gave to the streams and multiplies parts of them by fn; the second sums the parts up, follows
the iterations on the S x S numbers of a token in registers, in each of its programs, and mixes.

Legend: N tokens, S streams, H hidden, X = S H, C = S (S + 2) rows of fn, CP a power of two above it, B parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnout.kernels.common.dependent import launches_early

ROWS, COLUMNS, STEP = 16, 256, 64  # of a program that multiplies, and how many columns at a time
MIXED = 512  # columns of a stream of a program that mixes


@triton.jit(do_not_specialize=["N"])
def stream_products(
    x_ptr, post_ptr, y_ptr, fn_ptr, total_ptr, parts_ptr, N, H, X, B,
    S: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, ADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """total [N, X] = x + post [N, S] * y [N, H], both rounded, where ADDED is 1; x + y [N, X] where it is 2;
    x where it is 0, and not stored. parts float32 [N, B, CP]: of COLUMNS of X, products by fn [C, X], and in
    column C the sum of squares."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, CP)
    products = tl.zeros([ROWS, CP], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for at in tl.static_range(0, COLUMNS, STEP):
        k = tl.program_id(1) * COLUMNS + at + tl.arange(0, STEP)
        held = (n < N)[:, None] & (k < X)[None, :]
        x = tl.load(x_ptr + n[:, None] * X + k[None, :], mask=held, other=0.0).to(tl.float32)
        if ADDED == 1:
            post = tl.load(post_ptr + n[:, None] * S + (k // H)[None, :], mask=held, other=0.0)
            y = tl.load(y_ptr + n[:, None] * H + (k % H)[None, :], mask=held, other=0.0).to(tl.float32)
            x += (post * y).to(x_ptr.dtype.element_ty).to(tl.float32)
        if ADDED == 2:
            x += tl.load(y_ptr + n[:, None] * X + k[None, :], mask=held, other=0.0).to(tl.float32)
        if ADDED > 0:
            rounded = x.to(total_ptr.dtype.element_ty)
            tl.store(total_ptr + n[:, None] * X + k[None, :], rounded, mask=held)
            x = rounded.to(tl.float32)
        fn = tl.load(
            fn_ptr + c[None, :] * X + k[:, None], mask=(c < C)[None, :] & (k < X)[:, None], other=0.0
        )
        products = tl.dot(x, fn, products, input_precision="ieee")
        squares += tl.sum(x * x, 1)
    products = tl.where((c == C)[None, :], squares[:, None], products)
    to = (n[:, None] * B + tl.program_id(1)) * CP + c[None, :]
    tl.store(parts_ptr + to, products, mask=(n < N)[:, None])


@triton.jit
def stream_mixture(
    total_ptr, parts_ptr, base_ptr, scale_ptr, x_ptr, post_ptr, mixed_ptr, H, X, B, eps, norm_eps,
    S: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, BP: tl.constexpr, ITERATIONS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [N, H], float32 post [N, S] and mixed [N, S, H] of total [N, S, H] and the parts of its products."""
    n = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.arange(0, BP)
    j = tl.arange(0, S)
    of_mix = 2 * S + j[:, None] * S + j[None, :]
    base_pre, base_post = tl.load(base_ptr + j), tl.load(base_ptr + S + j)
    base_mix = tl.load(base_ptr + of_mix)
    scale_pre, scale_post, scale_mix = tl.load(scale_ptr), tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = parts_ptr + (n * B + b) * CP
    squares = tl.sum(tl.load(part + C, mask=b < B, other=0.0), 0)
    unit = tl.rsqrt(squares / X + norm_eps)
    known = (b < B)[:, None]
    pre = tl.sum(tl.load(part[:, None] + j[None, :], mask=known, other=0.0), 0) * unit
    post = tl.sum(tl.load(part[:, None] + S + j[None, :], mask=known, other=0.0), 0) * unit
    mix = tl.load(part[:, None, None] + of_mix[None, :, :], mask=known[:, :, None], other=0.0)
    mix = tl.sum(mix, 0) * unit * scale_mix + base_mix
    pre = tl.sigmoid(pre * scale_pre + base_pre) + eps
    post = 2 * tl.sigmoid(post * scale_post + base_post)
    mix = tl.exp(mix - tl.max(mix, 1)[:, None])
    mix = mix / tl.sum(mix, 1)[:, None] + eps
    mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    for _ in range(ITERATIONS - 1):
        mix = mix / (tl.sum(mix, 1) + eps)[:, None]
        mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    if tl.program_id(1) == 0:
        tl.store(post_ptr + n * S + j, post)
    held = (h < H)[None, :]
    at = n * X + j[:, None] * H + h[None, :]
    streams = tl.load(total_ptr + at, mask=held, other=0.0).to(tl.float32)
    x = tl.sum(pre[:, None] * streams, 0)
    tl.store(x_ptr + n * H + h, x.to(x_ptr.dtype.element_ty), mask=h < H)
    mixed = tl.sum(mix[:, :, None] * streams[:, None, :], 0)
    tl.store(mixed_ptr + at, mixed.to(mixed_ptr.dtype.element_ty), mask=held)


def connect(
    x_NSH: Tensor,
    added: Tensor | tuple[Tensor, Tensor] | None,
    fn_CX: Tensor,
    base_C: Tensor,
    scale_3: Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(the input [N, H] of a block, float32 post [N, S], the streams [N, S, H] mixed).

    added: to the streams before: [N, S, H], or float32 post [N, S] and y [N, H]. fn, base, scale: float32,
    contiguous. S is a power of two.
    """
    N, S, H = x_NSH.shape
    x_NSH, device, C, X = x_NSH.contiguous(), x_NSH.device, len(fn_CX), S * H
    CP, B = max(16, triton.next_power_of_2(C + 1)), triton.cdiv(X, COLUMNS)
    kind, post_in, y = 0, scale_3, x_NSH
    if isinstance(added, tuple):
        kind, (post_in, y) = 1, (part.contiguous() for part in added)
    elif added is not None:
        kind, y = 2, added.contiguous()
    total_NSH = torch.empty_like(x_NSH) if kind else x_NSH
    out_NH, mixed_NSH = x_NSH.new_empty(N, H), torch.empty_like(x_NSH)
    post_NS = torch.empty(N, S, dtype=torch.float32, device=device)
    parts_NBC = torch.empty(N, B, CP, dtype=torch.float32, device=device)
    early = launches_early(device)
    if N:
        stream_products[(triton.cdiv(N, ROWS), B)](
            x_NSH, post_in, y, fn_CX, total_NSH, parts_NBC, N, H, X, B,
            S, C, CP, kind, ROWS, COLUMNS, STEP, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
        stream_mixture[(N, triton.cdiv(H, MIXED))](
            total_NSH, parts_NBC, base_C, scale_3, out_NH, post_NS, mixed_NSH, H, X, B, eps, norm_eps,
            S, C, CP, triton.next_power_of_2(B), iterations, MIXED, early, num_warps=4, launch_pdl=early,
        )  # fmt: skip
    return out_NH, post_NS, mixed_NSH
