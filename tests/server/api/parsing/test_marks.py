"""Marks at the end of text that is not complete."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turnout.server.api.parsing.marks import undecided

LETTERS = st.text("ab<|\n", max_size=8)


@given(LETTERS, st.integers(0, 8), st.lists(st.text("ab<|\n", min_size=1, max_size=5), max_size=3))
def test_the_longest_beginning_of_a_mark_is_held(text: str, at: int, marks: list[str]):
    at = min(at, len(text))
    ends = [text[start:] for start in range(at, len(text))]
    begun = [len(end) for end in ends for mark in marks if mark.startswith(end) and mark != end]
    assert undecided(text, at, marks) == max(begun, default=0)
