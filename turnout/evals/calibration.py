"""What `turnout quantize` runs a model on: the user's own text, or worked word problems.

The problems are of the bundled model's train split, so that measuring on held-out questions stays fair.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnout.engine.calibration import Sample
from turnout.errors import UserError
from turnout.evals import wordmath

FORMS = '{"text": ...}, {"messages": [...]}, {"prompt": ...} or {"question": ..., "answer": ...}'


def load_samples(file: Path | None) -> list[Sample]:
    """Samples of a .jsonl file, the lines of any other text file, or the conversations of wordmath's train
    split.

    Raises UserError naming the file and line that cannot be read.
    """
    if file is None:
        return [conversation(p.question, p.answer) for p in wordmath.train()]
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--calibration {file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"--calibration {file}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"--calibration {file}: holds no text")
    if file.suffix == ".jsonl":
        return [_parse(line, f"--calibration {file}:{i}") for i, line in numbered]
    return [line for _, line in numbered]


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _parse(line: str, where: str) -> Sample:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg})") from None
    found = _sample(record) if isinstance(record, dict) else None
    if found is None:
        raise UserError(f"{where}: must be one of {FORMS}")
    return found


def _sample(record: dict[str, Any]) -> Sample | None:
    messages = record.get("messages")
    if isinstance(messages, list) and messages:
        return messages if all(_is_message(message) for message in messages) else None
    texts = [record[key] for key in ("text", "prompt") if isinstance(record.get(key), str)]
    if texts:
        return texts[0]
    question, answer = record.get("question"), record.get("answer")
    if isinstance(question, str) and isinstance(answer, str):
        return conversation(question, answer)
    return None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
