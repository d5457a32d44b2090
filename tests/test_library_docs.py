"""docs/library.md: every snippet runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "library.md"
SNIPPET = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
SNIPPETS = SNIPPET.findall(PAGE.read_text(encoding="utf-8"))


def test_every_snippet_shows_its_output():
    assert len(SNIPPETS) == PAGE.read_text(encoding="utf-8").count("```python") > 0


@pytest.mark.parametrize(("code", "expected"), SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_prints_what_the_page_says(code, expected, monkeypatch):
    monkeypatch.setenv("TURNOUT_DEVICE", "cpu")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {})
    assert printed.getvalue() == expected
