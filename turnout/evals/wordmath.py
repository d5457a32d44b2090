"""Grade-school word problems: the task that the bundled model was trained for.

The package ships 4000 questions that the model has never seen, with their answers, and worked problems of the
split that it was trained on, which calibration reads. `tools/demo/wordmath.py` of the source repository makes
both.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from turnout.errors import UserError

ASSETS = Path(__file__).parents[1] / "assets"
HELDOUT, TRAIN = ASSETS / "wordmath-heldout.jsonl.xz", ASSETS / "wordmath-train.jsonl.xz"

_FINAL = re.compile(r"####\s*\$?(-?[\d.,]*\d)")


@dataclass(frozen=True)
class Problem:
    """`answer`: reasoning, if it is known, and as its last line `#### {final}`."""

    question: str
    answer: str
    final: str


def heldout(count: int, seed: int) -> list[Problem]:
    """`count` of the questions that the model has not seen, drawn without repetition.

    A seed names the same ones everywhere, and fewer are the first of more. Raises UserError for more than
    there are.
    """
    problems = _read(HELDOUT)
    if count > len(problems):
        raise UserError(
            f"{count} questions of wordmath: there are {len(problems)}; ask for fewer, or give a .jsonl file"
        )
    order = list(range(len(problems)))
    random.Random(seed).shuffle(order)
    return [problems[i] for i in order[:count]]


def train() -> list[Problem]:
    """Worked problems of the split that the model was trained on."""
    return list(_read(TRAIN))


def extract_answer(text: str) -> str | None:
    """The number after the last `####` as it is written, or None if there is none."""
    found = _FINAL.findall(text)
    return found[-1] if found else None


@cache
def _read(file: Path) -> tuple[Problem, ...]:
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return tuple(Problem(r["question"], r["answer"], extract_answer(r["answer"]) or "") for r in records)
