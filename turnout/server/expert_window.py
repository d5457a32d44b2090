"""How tokens spread over experts and ranks in the last minute, from the ranks' cumulative counts.

Each question leaves a snapshot that later ones are compared with.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]  # [MoE layer, expert], or [1, data-parallel rank]
SECONDS = 60.0
APART = 0.5  # seconds between snapshots
HOT = 0.01  # the share of all experts that counts as hot


class CountWindow:
    """read: by rank, its counts since it started, e.g. how often each [layer][expert] was chosen."""

    def __init__(
        self,
        read: Callable[[], Mapping[int, list[list[int]]]],
        seconds: float = SECONDS,
        now: Callable[[], float] = time.monotonic,
    ):
        self._read, self._seconds, self._now = read, seconds, now
        self._snapshots: deque[tuple[float, Counts]] = deque()

    def totals(self) -> Counts:
        """Over all ranks, since they started."""
        of_ranks = [np.asarray(counts, dtype=np.int64) for counts in self._read().values()]
        return sum(of_ranks[1:], start=of_ranks[0]) if of_ranks else np.zeros((0, 0), dtype=np.int64)

    def recent(self) -> Counts:
        """In the window: since the first question within it, or the last one before it; at first, since the
        ranks started."""
        now, totals = self._now(), self.totals()
        kept = self._snapshots
        if kept and (kept[-1][1].shape != totals.shape or (totals < kept[-1][1]).any()):
            kept.clear()  # the ranks restarted
        while len(kept) > 1 and kept[1][0] <= now - self._seconds:
            kept.popleft()
        gained = totals - kept[0][1] if kept else totals
        if not kept or now - kept[-1][0] >= APART:
            kept.append((now, totals))
        return gained


def balancedness(counts: Counts) -> dict[int, float]:
    """Mean over maximum of each row that has any; 1 is even."""
    return {row: float(of.mean() / of.max()) for row, of in enumerate(counts) if of.any()}


def hot_share(counts: Counts) -> float | None:
    """What the busiest hundredth of all (layer, expert) pairs, at least one, got of all tokens; None if there
    were none."""
    if not counts.any():
        return None
    hot = max(1, round(HOT * counts.size))
    return float(np.partition(counts.ravel(), -hot)[-hot:].sum() / counts.sum())


def by_slice(counts: Counts, slices: int) -> Counts:
    """[slices]: tokens that went to each expert-parallel slice of the experts."""
    return counts.sum(axis=0).reshape(slices, -1).sum(axis=1) if counts.size else np.zeros(slices, np.int64)
