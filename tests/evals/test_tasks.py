"""Tasks: GSM8K's file format, the generator's questions, and what counts as right."""

from __future__ import annotations

import json

import pytest

from turnout.errors import UserError
from turnout.evals import wordmath
from turnout.evals.tasks import DEFAULT_QUESTIONS, Question, canonical, is_correct, load_task

GSM8K = [  # the form of the published file, calculator annotations included
    {
        "question": "Tom has 3 boxes of 4 pens. How many pens?",
        "answer": "Tom has 3*4=<<3*4=12>>12 pens.\n#### 12",
    },
    {"question": "A car costs $2,125 twice over. Total?", "answer": "2125*2=<<2125*2=4250>>4250\n#### 4,250"},
    {"question": "Three degrees below zero?", "answer": "#### -3"},
]


def write(folder, lines) -> str:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_a_file_in_gsm8ks_format(tmp_path):
    questions = load_task(write(tmp_path, [*GSM8K, "", "  "]), 0, seed=0)
    assert [q.expected for q in questions] == ["12", "4250", "-3"]
    assert questions[0].text == GSM8K[0]["question"]
    assert load_task(write(tmp_path, GSM8K), 2, seed=0) == questions[:2]
    assert load_task(write(tmp_path, GSM8K), 9, seed=0) == questions


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not valid JSON"),
        ("[1]", '"question" and "answer"'),
        ({"question": "?"}, '"question" and "answer"'),
        ({"question": "?", "answer": 12}, '"question" and "answer"'),
        ({"question": "?", "answer": "12"}, "must end in `#### N`"),
        ({"question": "?", "answer": "#### twelve"}, "must end in `#### N`"),
    ],
)
def test_a_malformed_line_is_named(line, words, tmp_path):
    path = write(tmp_path, [GSM8K[0], "", line])
    with pytest.raises(UserError, match=f"{path}:3: .*{words}"):
        load_task(path, 0, seed=0)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_task(str(tmp_path / "none.jsonl"), 0, seed=0)
    with pytest.raises(UserError, match="holds no question"):
        load_task(write(tmp_path, ["", ""]), 0, seed=0)
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9"}')
    with pytest.raises(UserError, match="not UTF-8 text"):
        load_task(str(tmp_path / "latin.jsonl"), 0, seed=0)
    with pytest.raises(UserError, match=r"--task 'gsm8': must be `wordmath`, `gsm8k` or a \.jsonl file"):
        load_task("gsm8", 0, seed=0)


def test_questions_are_held_out_and_follow_the_seed():
    questions = load_task("wordmath", 0, seed=3)
    assert len(questions) == DEFAULT_QUESTIONS
    assert questions[:5] == load_task("wordmath", 5, seed=3)
    assert questions[:5] != load_task("wordmath", 5, seed=4)
    problems = wordmath.heldout(5, 3)
    assert [(q.text, q.expected) for q in questions[:5]] == [(p.question, p.final) for p in problems]


@pytest.mark.parametrize(
    ("number", "plain"),
    [("12", "12"), ("1,234", "1234"), ("$5", "5"), ("3.50", "3.5"), ("3.0", "3"), ("-0", "0"), ("7.", "7")],
)
def test_numbers_are_compared_as_numbers(number, plain):
    assert canonical(number) == plain


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("3 * 4 = 12\n#### 12", True),
        ("#### 12.00", True),
        ("####12", True),
        ("#### $12", True),
        ("#### 13\n#### 12", True),  # the last counts
        ("#### 12\n#### 13", False),
        ("12", False),
        ("#### 120", False),
        ("#### -12", False),
        ("", False),
    ],
)
def test_what_counts_as_right(text, right):
    assert is_correct(text, Question(text="?", expected="12")) is right
