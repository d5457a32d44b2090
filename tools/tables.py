"""Tables and lists in Markdown, as generated pages have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTICE = "<!-- Written by tools/generate_docs.py from what the code declares; edit that instead. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def yes(value: bool) -> str:
    return "yes" if value else "no"
