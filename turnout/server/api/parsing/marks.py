"""Literal marks in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence


def either(marks: Sequence[str]) -> re.Pattern[str] | None:
    """Matches any of `marks`, the longest where several begin; None for none."""
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def undecided(text: str, at: int, marks: Sequence[str]) -> int:
    """How many characters at the end of `text`, from `at` on, may be the beginning of a mark."""
    longest = min(len(text) - at, max(map(len, marks), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
