"""Functions of the package are short enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "turnout"
MOST = 60  # lines

# Those that are longer, and how long they may be: none is added, and who shortens one takes it out.
LONGER = {
    "kernels/attention/latent.py: attend_latent_span": 61,
}


def lengths(source: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function, decorators not counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_functions_are_short():
    found = {
        f"{file.relative_to(PACKAGE).as_posix()}: {name}": lines
        for file in sorted(PACKAGE.rglob("*.py"))
        for name, lines in lengths(file.read_text(encoding="utf-8"))
        if lines > MOST
    }
    too_long = {name: lines for name, lines in found.items() if lines > LONGER.get(name, MOST)}
    assert not too_long, f"split them into functions with names of their own: {too_long}"


def test_lines_are_counted():
    one = "@decorated\ndef one(\n    x,\n):\n    return x\n\n\n"
    text = one + "class A:\n    async def two(self):\n        pass\n"
    assert dict(lengths(text)) == {"one": 4, "two": 2}
