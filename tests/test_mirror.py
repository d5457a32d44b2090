"""Tests stand where what they test stands, and helpers say in one line what they are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS, PACKAGE = ROOT / "tests", ROOT / "turnout"
# Folders whose files are alike and tested alike, and where.
TOGETHER = {
    "moe/backends/hopper/kernels": "moe/backends/hopper/test_kernels.py",
    "server/api/anthropic": "server/api/test_protocols.py",
    "server/api/openai_responses": "server/api/test_protocols.py",
    "server/api/parsing/families": "server/api/parsing/test_round_trip.py",
}


def folders(root: Path) -> set[str]:
    """Folders below `root` with Python files other than `__init__.py` and `declaration.py`."""
    code = (f for f in root.rglob("*.py") if f.name not in ("__init__.py", "declaration.py"))
    return {str(f.parent.relative_to(root)) for f in code} - {"."}


def test_every_folder_of_tests_is_one_of_what_they_test():
    package = folders(PACKAGE)
    assert folders(TESTS) - {"tools"} <= package | {str(Path(f).parent) for f in package}


def test_every_folder_of_the_package_has_its_tests():
    missing = folders(PACKAGE) - folders(TESTS)
    assert missing == TOGETHER.keys()
    assert all((TESTS / file).is_file() for file in TOGETHER.values())


HELPERS = [f for f in sorted(TESTS.rglob("*.py")) if not f.name.startswith(("test_", "__"))]


@pytest.mark.parametrize("file", HELPERS, ids=lambda file: str(file.relative_to(TESTS)))
def test_helpers_say_in_one_line_what_they_are(file: Path):
    first, *rest = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()
    assert first.endswith(".")
    assert not any(rest[:1]), "the first line stands by itself"
