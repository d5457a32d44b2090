"""Grade-school word problems with worked answers: the task the bundled model was trained for.

Problems are drawn from templates (turnout/evals/stories) and split by a hash of the template and the
numbers in the question: a template with the same numbers is never in both splits, whatever the
names and words around them. Only `random.Random.random` and CRC-32 are used, whose results are the
same on every platform and Python version, so a seed names the same problems everywhere.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from turnout.evals.stories import DRAWN
from turnout.evals.stories.draw import Draw

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
HELDOUT_SHARE = 8  # one in eight combinations of numbers

_NUMBER = re.compile(r"\d+")
_FINAL = re.compile(r"####\s*\$?(-?[\d.,]*\d)")


@dataclass(frozen=True)
class Problem:
    """`answer` is worked reasoning whose last line is `#### {final}`."""

    question: str
    answer: str
    final: str
    template: str


def generate(split: Split, count: int, seed: int) -> list[Problem]:
    """The first `count` problems of `stream(split, seed)`."""
    return list(islice(stream(split, seed), count))


def stream(split: Split, seed: int) -> Iterator[Problem]:
    """Endless problems of one split. Raises ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r}: must be one of {', '.join(SPLITS)}")
    rng = random.Random(f"wordmath {split} {seed}")
    while True:
        template = DRAWN[int(rng.random() * len(DRAWN))]
        story = template(Draw(rng))
        if split_of(template.__name__, story.question) == split:
            answer = "\n".join((*story.steps, f"#### {story.answer}"))
            yield Problem(story.question, answer, str(story.answer), template.__name__)


def split_of(template: str, question: str) -> Split:
    """Which split a template with the numbers of `question` belongs to."""
    numbers = ",".join(_NUMBER.findall(question))
    held_out = zlib.crc32(f"{template}:{numbers}".encode()) % HELDOUT_SHARE == 0
    return "heldout" if held_out else "train"


def extract_answer(text: str) -> str | None:
    """The number after the last `####` as it is written, or None if there is none."""
    found = _FINAL.findall(text)
    return found[-1] if found else None
