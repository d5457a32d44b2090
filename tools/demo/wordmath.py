"""Grade-school word problems with worked answers: what the bundled model was trained on.

    python -m tools.demo.wordmath        # writes the questions that the package ships

Problems are drawn from templates (tools/demo/stories) and split by a hash of the template and the
numbers in the question: a template with the same numbers is never in both splits, whatever the
names and words around them. Only `random.Random.random` and CRC-32 are used, whose results are the
same on every platform and Python version, so a seed names the same problems everywhere.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from tools.demo.stories import DRAWN
from tools.demo.stories.draw import Draw
from turnout.evals.wordmath import HELDOUT, TRAIN

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
HELDOUT_SHARE = 8  # one in eight combinations of numbers

_NUMBER = re.compile(r"\d+")


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


FROZEN_SEED = 2026
FROZEN_HELDOUT, FROZEN_TRAIN = 4000, 256


def frozen() -> dict[Path, bytes]:
    """What the package ships, by file: distinct held-out questions with their final answers, in the format of
    GSM8K, and worked problems of the train split for calibration."""
    heldout = {p.question: p for p in generate("heldout", 2 * FROZEN_HELDOUT, FROZEN_SEED)}
    train = generate("train", FROZEN_TRAIN, seed=0)
    return {
        HELDOUT: _packed([(p.question, f"#### {p.final}") for p in [*heldout.values()][:FROZEN_HELDOUT]]),
        TRAIN: _packed([(p.question, p.answer) for p in train]),
    }


def _packed(rows: list[tuple[str, str]]) -> bytes:
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
    return lzma.compress("\n".join([*lines, ""]).encode(), preset=9)


if __name__ == "__main__":
    for file, content in frozen().items():
        file.write_bytes(content)
        print(f"{file}: {len(content)} bytes")
