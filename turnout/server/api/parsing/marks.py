"""Literal marks in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache


def either(marks: Sequence[str]) -> re.Pattern[str] | None:
    """Matches any of `marks`, the longest where several begin; None for none."""
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def undecided(text: str, at: int, marks: Sequence[str]) -> int:
    """How many characters at the end of `text`, from `at` on, may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    begun = _begun(tuple(marks)).search(text, max(at, len(text) - longest))
    return len(text) - begun.start() if begun is not None else 0


@lru_cache(maxsize=256)
def _begun(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the beginning of a mark that a text ends with, the longest, which is the first to be found."""
    beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
    return re.compile(rf"(?:{'|'.join(map(re.escape, sorted(beginnings)))})\Z" if beginnings else r"(?!)")
