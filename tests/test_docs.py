"""What pages of the documentation name exists: files, anchors, flags, messages of docs/troubleshooting.md."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_cli_flags import commands
from turnout.commands.other_engines import INSTEAD

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
}
OTHERS = {"--nproc-per-node", "--master-addr", "--no-deps", "--model_args"}  # of other programs
OTHERS |= INSTEAD.keys()
OTHERS |= {"--nodes", "--gpus-per-node", "--from-literal", "--address"}  # of sbatch, kubectl, ray


@cache
def text(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", text(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = PAGES[page].parent / file if file else PAGES[page]
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    for name in re.findall(
        r"`((?:turnout|tests|tools|benchmarks|docs|moe|kernels|engine|parallel)/[\w./*-]*)`", text(page)
    ):
        found = [*ROOT.glob(name), *(ROOT / "turnout").glob(name)]
        assert found, name


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_are_named_exist(page):
    known = {option for options in commands().values() for option in options} | OTHERS | {"--json", "--help"}
    scripts = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tools").rglob("*.py"))
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]*\b", text(page))):
        assert flag in known or f'"{flag}"' in scripts or flag.startswith("--no-"), flag


def test_messages_of_the_troubleshooting_page_are_those_of_the_code():
    said = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "turnout").rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", said)  # a message over several lines
    rows = [line.split(" | ") for line in text("docs/troubleshooting.md").splitlines() if line[:2] == "| "]
    quoted = {words for row in rows for cell in row[:2] for words in re.findall(r"`([^`]*)`", cell)}
    quoted = {words for words in quoted if " " in words}
    messages = {words for words in quoted if not re.match(r"turnout |--|curl |runner torch", words)}
    assert len(messages) > 20
    for message in messages:
        for part in filter(None, message.split("...")):
            assert part in said, message
