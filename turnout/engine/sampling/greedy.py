"""The likeliest token of each row, and whether the row can be trusted.

Legend: S rows, V vocabulary, C columns: token, whether its logit is finite, and, where asked for, whether the
choice is a near-tie: one that rounding could turn, for the two best logits are closer than noise
(step/near_ties.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CLOSE = 1e-4  # of the spread between a row's largest and smallest logit


def greedy(logits_SV: Tensor, *, near_ties: bool, low_S: Tensor | None = None) -> Tensor:
    """int64 [C, S]. Of equal logits the lowest id is taken. May overwrite the logits.

    low_S: the smallest logits, where some were made -inf since.
    """
    if logits_SV.is_cpu:
        low = None if low_S is None else low_S.numpy()
        return torch.from_numpy(_on_host(logits_SV.numpy(), near_ties, low))
    return _on_device(logits_SV, near_ties, low_S)


def _on_device(logits_SV: Tensor, near_ties: bool, low_S: Tensor | None) -> Tensor:
    """`max` hands on a NaN, so that one pass finds the token and tells whether the row can be trusted."""
    values_S, ids_S = logits_SV.max(dim=-1)
    columns = [ids_S, values_S.isfinite()]
    if near_ties:
        columns.append(find_near_ties(logits_SV, ids_S, low_S))
    return torch.stack(columns)  # one transfer


def _on_host(logits_SV: np.ndarray, near_ties: bool, low_S: np.ndarray | None) -> np.ndarray:
    """The same in numpy, whose argmax takes a tenth of the time of torch's on a CPU, and calls a third."""
    columns_CS = np.empty((2 + near_ties, len(logits_SV)), dtype=np.int64)
    rows_S, ids_S = np.arange(len(logits_SV)), logits_SV.argmax(-1)
    top_S = logits_SV[rows_S, ids_S]
    columns_CS[0], columns_CS[1] = ids_S, np.isfinite(top_S)
    if near_ties:
        if low_S is None:
            low_S = logits_SV.min(-1)
        logits_SV[rows_S, ids_S] = -np.inf
        with np.errstate(invalid="ignore"):  # of rows that are not finite
            columns_CS[2] = top_S - logits_SV.max(-1) < CLOSE * (top_S - low_S)
    return columns_CS


def find_near_ties(logits_SV: Tensor, best_S: Tensor, low_S: Tensor | None = None) -> Tensor:
    """bool [S]: whether a logit other than the best one comes close to it. May overwrite the best ones.

    low_S: the smallest logits, where some were made -inf since.
    """
    best_S1 = best_S[:, None]
    top_S1 = logits_SV.gather(1, best_S1)
    if low_S is None:
        low_S = logits_SV.amin(-1)
    second_S = logits_SV.scatter_(1, best_S1, float("-inf")).amax(-1)
    return top_S1[:, 0] - second_S < CLOSE * (top_S1[:, 0] - low_S)
