"""Code and documentation say it in the field's words, or else in plain English: what is not said any more."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The former word, and what is said instead.
FORMER = {
    "obey": "keep to, follow",
    "wish": "request, option",
    "mend": "fix",
    "beside": "next to",
    "lest": "so that ... not",
    "nobody": "no rank, no request, no client",
    "anew": "again; restart",
    "thereby": "so, then",
    "company": "batch, other requests; to take part",
    "travel": "be dispatched, be combined, be sent",
    "slab": "batched_experts",
    "lockstep": "step sync",
    "underway": "in flight",
    "bucketed": "runner by batch size",
    "blueprint": "engine plan",
}
ENDINGS = "(s|es|ed|ing|led|ling|ly)?"
PATTERN = re.compile(rf"\b({'|'.join(FORMER)}){ENDINGS}\b", re.IGNORECASE)
# Earlier names that still work, tables of what was renamed, names of result files, and prose of the tasks.
ALLOWED = {
    "turnout/moe/plan.py": r"\bWishes\(|\"Wishes\"|\bwishes\b",
    "turnout/engine/layer_inputs.py": r"train leaves|travel",
    "turnout/engine/parallel_layouts.py": r"\"slabs\"",
    "tools/compare_plans.py": r".",
    "tools/headline.py": r"serving-beside-vllm",
    "tools/timeline.py": r"tile_\(\?:slabs",
    "tools/performance.py": r"serving-beside-vllm",
}


def said(file: Path) -> list[str]:
    """Lines of `file` with a former word, but for those that it may have."""
    allowed = ALLOWED.get(str(file.relative_to(ROOT)))
    return [
        f"{file.relative_to(ROOT)}:{number}: {found[0]!r}: say {FORMER[found[1].lower()]}"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if (found := PATTERN.search(line)) and not (allowed and re.search(allowed, line))
    ]


def test_no_former_word_is_said():
    code = [f for folder in ("turnout", "tools") for f in sorted((ROOT / folder).rglob("*.py"))]
    demo = ROOT / "tools" / "demo"  # which tells stories
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    files = [file for file in (*code, *pages) if not file.is_relative_to(demo)]
    assert [line for file in files for line in said(file)] == []


def test_a_former_word_is_found():
    assert PATTERN.search("tokens that travelled")
    assert PATTERN.search("Mended")
    assert not PATTERN.search("recommended, amending, wishbone, accompany")
