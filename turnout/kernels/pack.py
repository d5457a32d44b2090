"""Tokens to rows of words for the wire (Triton): hidden state, expert ids and weights in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # words at a time


@triton.jit
def pack_rows(
    x_ptr, ids_ptr, weights_ptr, words_ptr, ints_ptr, floats_ptr, T, row_words, ids_at, weights_at,
    X_WORDS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Row r of `words` int64 [., row_words]: X_WORDS of token r, then its K ids and weights.

    `ints` and `floats` are the same memory in 4-byte units, `ids_at` and `weights_at` places in a row of
    those. Rows from T on are padding: zeros, with ids -1.
    """
    row = tl.program_id(0).to(tl.int64)
    real = row < T
    for at in range(0, X_WORDS, WORDS):
        c = at + tl.arange(0, WORDS)
        word = tl.load(x_ptr + row * X_WORDS + c, mask=real & (c < X_WORDS), other=0)
        tl.store(words_ptr + row * row_words + c, word, mask=c < X_WORDS)
    k = tl.arange(0, KP)
    ids = tl.load(ids_ptr + row * K + k, mask=real & (k < K), other=-1)
    weights = tl.load(weights_ptr + row * K + k, mask=real & (k < K), other=0.0)
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
) -> None:
    """Fill out int64 [R, W], of which ints and floats are views; the rest contiguous, R at least T."""
    (T, X), K = x_words_TX.shape, ids_TK.shape[1]
    if len(out_RW):
        pack_rows[(len(out_RW),)](
            x_words_TX, ids_TK, weights_TK, out_RW, ints_RW2, floats_RW2, T, out_RW.shape[1], ids_at,
            weights_at, X, K, triton.next_power_of_2(K), BLOCK,
        )  # fmt: skip
