"""Greedy choices that rounding could turn: the two best logits are closer than noise (step/near_ties.py).

Legend: S rows sampled, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

CLOSE = 1e-4  # of the spread between a row's largest and smallest logit


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
