"""A router's choice in one pass: softmax, top-k, renormalising, padding and counting.

Composed by torch it is ten calls. The largest logit is taken k times, the lowest id among equals.

Legend: T tokens, E experts, k top-k.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from turnout.kernels.cpu.jit import kernel
from turnout.kernels.cpu.vectors import get_f32, get_i64, get_u8, put_f32, put_i32, put_i64

MOST_TAKEN = np.float32(-np.inf)
LOWEST = np.float32(-3e38)


@kernel("void(int64, int64, int64, int64, int64, int64, float32, int64, int64, int64, int64, int64)")
def _choose(logits, left, real, ids, weights, counts, scaling, T, E, K, of_all, renormalize):
    """ids int32 [T, K] and weights float32 [T, K] of logits [T, E]; counts int64 [E] += choices.

    of_all: weights are shares of the softmax over all experts, not over the chosen ones only. Rows that
    real, bool [T] or 0, denies get ids -1 and weights 0. A row with a NaN gets weights NaN. left: float32
    [E], for what is not taken yet.
    """
    for t in range(T):
        if real and get_u8(real + t) == 0:
            for j in range(K):
                put_i32(ids + (t * K + j) * 4, -1)
                put_f32(weights + (t * K + j) * 4, np.float32(0.0))
            continue
        row = logits + t * E * 4
        whole, chosen, best = np.float32(0.0), np.float32(0.0), MOST_TAKEN
        for e in range(E):
            x = get_f32(row + 4 * e)
            # What may be chosen stays above -inf, whatever it is, so that no expert is taken twice.
            bounded = x if x > LOWEST else LOWEST
            put_f32(left + 4 * e, bounded)
            best = max(best, bounded)
        for e in range(E):
            whole += np.float32(math.exp(get_f32(row + 4 * e) - best))  # NaN if any logit is
        for j in range(K):
            top, at = MOST_TAKEN, 0
            for e in range(E):
                x = get_f32(left + 4 * e)
                if x > top:
                    top, at = x, e
            put_f32(left + 4 * at, MOST_TAKEN)
            power = np.float32(math.exp(top - best))
            chosen += power
            put_i32(ids + (t * K + j) * 4, at)
            put_f32(weights + (t * K + j) * 4, power)
            put_i64(counts + 8 * at, get_i64(counts + 8 * at) + 1)
        share = chosen if renormalize or not of_all else whole
        for j in range(K):
            at = weights + (t * K + j) * 4
            put_f32(at, (get_f32(at) / share + np.float32(0.0) * whole) * scaling)


def choose(
    logits_TE: Tensor,
    top_k: int,
    *,
    of_all: bool,
    renormalize: bool,
    scaling: float,
    real_T: Tensor | None,
    counts_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, k], weights float32 [T, k]); see `_choose`."""
    logits_TE = logits_TE.float().contiguous()
    T, E = logits_TE.shape
    ids_TK, weights_TK = torch.empty(T, top_k, dtype=torch.int32), torch.empty(T, top_k)
    left_E, real = torch.empty(E), 0 if real_T is None else real_T.data_ptr()
    _choose(
        logits_TE.data_ptr(), left_E.data_ptr(), real, ids_TK.data_ptr(), weights_TK.data_ptr(),
        counts_E.data_ptr(), scaling, T, E, top_k, of_all, renormalize,
    )  # fmt: skip
    return ids_TK, weights_TK
