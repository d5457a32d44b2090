"""Accuracy with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Accuracy:
    """`correct` of `total`, with the Wilson score interval at 95 %.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """

    correct: int
    total: int

    @property
    def value(self) -> float:
        return self.correct / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        n, p, z2 = self.total, self.value, Z_95**2
        centre = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"{100 * self.value:.1f} % ({self.correct} of {self.total}; "
            f"95 % interval {100 * low:.1f} to {100 * high:.1f})"
        )
