"""docs/library.md and docs/extending.md: every snippet runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {name: (DOCS / name).read_text(encoding="utf-8") for name in ("library.md", "extending.md")}
SNIPPET = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
SNIPPETS = [
    pytest.param(code, expected, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, (code, expected) in enumerate(SNIPPET.findall(text))
]


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_every_snippet_shows_its_output(text):
    assert len(SNIPPET.findall(text)) == text.count("```python") > 0


@pytest.mark.parametrize(("code", "expected"), SNIPPETS)
def test_a_snippet_prints_what_the_page_says(code, expected, monkeypatch):
    monkeypatch.setenv("TURNOUT_DEVICE", "cpu")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs", "exec"), {})
    assert printed.getvalue() == expected
