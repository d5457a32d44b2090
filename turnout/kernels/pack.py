"""Tokens to rows of words for the wire, and the sums of what comes back, in one launch each (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words or values at a time


@triton.jit
def pack_rows(
    x_ptr, ids_ptr, weights_ptr, source_ptr, words_ptr, ints_ptr, floats_ptr, T, row_words, ids_at,
    weights_at,
    GATHER: tl.constexpr, X_WORDS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Row r of `words` int64 [., row_words]: X_WORDS of token r (GATHER: source[r]), its K ids and weights.

    `ints` and `floats` are the same memory in 4-byte units, `ids_at` and `weights_at` places in a row of
    those. Rows from T on are padding: zeros, with ids -1.
    """
    row = tl.program_id(0).to(tl.int64)
    real = row < T
    token = row
    if GATHER:
        token = tl.load(source_ptr + row)
        real = token >= 0
    for at in range(0, X_WORDS, WORDS):
        c = at + tl.arange(0, WORDS)
        word = tl.load(x_ptr + token * X_WORDS + c, mask=real & (c < X_WORDS), other=0)
        tl.store(words_ptr + row * row_words + c, word, mask=c < X_WORDS)
    k = tl.arange(0, KP)
    ids = tl.load(ids_ptr + token * K + k, mask=real & (k < K), other=-1)
    weights = tl.load(weights_ptr + token * K + k, mask=real & (k < K), other=0.0)
    tl.store(ints_ptr + row * (2 * row_words) + ids_at + k, ids, mask=k < K)
    tl.store(floats_ptr + row * (2 * row_words) + weights_at + k, weights, mask=k < K)


def pack(
    x_words_TX: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    out_RW: Tensor,
    ints_RW2: Tensor,
    floats_RW2: Tensor,
    ids_at: int,
    weights_at: int,
    source_R: Tensor | None = None,
) -> None:
    """Fill out int64 [R, W], of which ints and floats are views; the rest contiguous.

    Row r is token r, beyond T padding; or, with `source`, int64 [R], token source[r].
    """
    (T, X), K = x_words_TX.shape, ids_TK.shape[1]
    if len(out_RW):
        pack_rows[(len(out_RW),)](
            x_words_TX, ids_TK, weights_TK, ids_TK if source_R is None else source_R, out_RW, ints_RW2,
            floats_RW2, T, out_RW.shape[1], ids_at, weights_at, source_R is not None, X, K,
            triton.next_power_of_2(K), BLOCK,
        )  # fmt: skip


@triton.jit
def sum_rows_kernel(back_ptr, order_ptr, bags_ptr, out_ptr, H, BLOCK: tl.constexpr):
    """out[t] = the sum of back[order[i]] for i in [bags[t], bags[t + 1]), in this order, in float32."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.load(bags_ptr + t)
    end = tl.load(bags_ptr + t + 1)
    acc = tl.zeros([BLOCK], tl.float32)
    while i < end:
        row = tl.load(order_ptr + i)
        acc += tl.load(back_ptr + row * H + c, mask=c < H, other=0.0).to(tl.float32)
        i += 1
    tl.store(out_ptr + t * H + c, acc.to(out_ptr.dtype.element_ty), mask=c < H)


def sum_rows(back_SH: Tensor, order_S: Tensor, bags_T1: Tensor) -> Tensor:
    """[T, H] in back's dtype; order and bags int64, contiguous."""
    T, H = len(bags_T1) - 1, back_SH.shape[1]
    out_TH = torch.empty(T, H, dtype=back_SH.dtype, device=back_SH.device)
    if T:
        sum_rows_kernel[(T, triton.cdiv(H, BLOCK))](back_SH, order_S, bags_T1, out_TH, H, BLOCK)
    return out_TH


@triton.jit
def sum_parts_kernel(parts_ptr, out_ptr, N, R: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = the sum of parts[r, n] for r in [0, R), in this order, in float32."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(R):
        acc += tl.load(parts_ptr + r * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, acc.to(out_ptr.dtype.element_ty), mask=n < N)


def sum_parts(parts_RTH: Tensor) -> Tensor:
    """[T, H] in the dtype of parts, which are contiguous."""
    R, T, H = parts_RTH.shape
    out_TH = torch.empty(T, H, dtype=parts_RTH.dtype, device=parts_RTH.device)
    if T:
        sum_parts_kernel[(triton.cdiv(T * H, BLOCK),)](parts_RTH, out_TH, T * H, R, BLOCK)
    return out_TH
