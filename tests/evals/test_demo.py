"""`make demo` from start to end, with the bundled model."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from turnout.evals.demo import QUESTIONS, SHOWN
from turnout.evals.wordmath import heldout


def test_what_is_printed():
    done = subprocess.run(
        [sys.executable, "-m", "turnout.evals.demo"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "400"},
    )
    assert done.returncode == 0, done.stderr
    again = re.search(r"^the same questions again: turnout eval demo (.*)$", done.stdout, re.MULTILINE)
    assert again is not None
    asked = re.fullmatch(rf"--num-questions {QUESTIONS} --seed (\d+)", again[1])
    assert asked is not None
    drawn = {problem.question for problem in heldout(QUESTIONS, int(asked[1]))}
    shown = re.findall(r"^Q (.*)$", done.stdout, re.MULTILINE)
    assert len(shown) == SHOWN + 2, "word problems, a tool call, JSON"
    assert set(shown[:SHOWN]) <= drawn, "the seed names what was asked"
    accuracy = re.search(rf"^accuracy \d+\.\d % \((\d+) of {QUESTIONS};", done.stdout, re.MULTILINE)
    assert accuracy is not None
    wrong = QUESTIONS - int(accuracy[1])
    assert len(re.findall(r"^─+ wrong ─+$", done.stdout, re.MULTILINE)) == min(wrong, SHOWN)
    assert f"result {4817 * 263}\n" in done.stdout
