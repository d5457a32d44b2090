"""Evaluation tasks: questions with a known final answer.

`wordmath` draws from the held-out questions that the package ships; `gsm8k` is the published test set, asked
with worked problems before each question (gsm8k.py); a `.jsonl` file is read in GSM8K's own format, one
{"question": ..., "answer": "... #### N"} per line, and asked as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from turnout.errors import UserError
from turnout.evals import gsm8k, wordmath

DEFAULT_QUESTIONS = 200


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, and the final answer as a canonical number string.

    any_number: where an answer has no `#### N`, its last number counts.
    """

    text: str
    expected: str
    any_number: bool = False


def load_task(task: str, count: int, seed: int) -> list[Question]:
    """`count` questions of `task` (0: all of a file, 200 of wordmath). Raises UserError."""
    if task == "wordmath":
        problems = wordmath.heldout(count or DEFAULT_QUESTIONS, seed)
        return [Question(text=p.question, expected=canonical(p.final)) for p in problems]
    if task == "gsm8k":
        questions = _gsm8k()
        return questions[:count] if count else questions
    if task.endswith(".jsonl"):
        questions = _read_jsonl(Path(task))
        return questions[:count] if count else questions
    raise UserError(
        f"--task {task!r}: must be `wordmath`, `gsm8k` or a .jsonl file of {{question, answer}} lines"
    )


def is_correct(answer_text: str, question: Question) -> bool:
    """Whether the last `#### N` of `answer_text` is the expected number."""
    if question.any_number:
        answer_text = gsm8k.before_next_question(answer_text)
    found = wordmath.extract_answer(answer_text)
    if found is None and question.any_number:
        found = gsm8k.last_number(answer_text)
    return found is not None and canonical(found) == question.expected


def canonical(number: str) -> str:
    """`1,234.50` -> `1234.5`; text that is no number is compared as it is."""
    plain = number.strip().replace(",", "").replace("$", "").rstrip(".")
    try:
        value = float(plain)
    except ValueError:
        return plain
    return str(int(value)) if value.is_integer() else repr(value)


def _gsm8k() -> list[Question]:
    """All of the test set but the problems that are shown worked."""
    lines = gsm8k.test_set().read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    worked = [(record["question"], record["answer"]) for record in records[: gsm8k.SHOTS]]
    return [
        Question(
            text=gsm8k.prompt(worked, record["question"]),
            expected=canonical(wordmath.extract_answer(record["answer"]) or ""),
            any_number=True,
        )
        for record in records[gsm8k.SHOTS :]
    ]


def _read_jsonl(path: Path) -> list[Question]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"--task {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--task {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    questions = [_parse_line(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UserError(f"--task {path}: holds no question")
    return questions


def _parse_line(line: str, where: str) -> Question:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON ({error.msg})") from None
    if not isinstance(record, dict) or not all(
        isinstance(record.get(k), str) for k in ("question", "answer")
    ):
        raise UserError(f'{where}: must be an object with the strings "question" and "answer"')
    final = wordmath.extract_answer(record["answer"])
    if final is None:
        raise UserError(f'{where}: "answer" must end in `#### N`')
    return Question(text=record["question"], expected=canonical(final))
