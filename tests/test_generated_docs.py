"""The generated documentation is what the code declares now, and being out of date is noticed."""

import importlib.util
from pathlib import Path

import pytest

from turnout.registry import ARCHITECTURES, DISPATCHERS, RUNNERS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_documentation_is_current(generator):
    assert generator.main(["--check"]) == 0, "run: python -m tools.generate_docs"


def test_what_is_out_of_date_is_noticed_and_mended(generator, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{generator.BEGIN}\nold\n{generator.END}\n\nthe rest\n")
    assert generator.main(["--check"], root=tmp_path) == 1
    assert "old" in readme.read_text()
    assert generator.main([], root=tmp_path) == 0
    assert generator.main(["--check"], root=tmp_path) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith(f"{generator.END}\n\nthe rest\n")
    for name in (*ARCHITECTURES, *RUNNERS, *DISPATCHERS):
        assert f"`{name}`" in text
    (tmp_path / "docs" / "backends.md").write_text("edited by hand")
    assert generator.main(["--check"], root=tmp_path) == 1
    assert "docs/backends.md: out of date" in capsys.readouterr().err


def test_tables_are_rectangular(generator):
    for text in (generator.backends(), generator.formats(), generator.support()):
        for block in text.split("\n\n"):
            if block.startswith("|"):
                assert len({line.count(" | ") for line in block.splitlines()}) == 1
