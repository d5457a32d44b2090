"""The word problems: the same everywhere, never shared between splits, and right."""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from turnout.evals import wordmath
from turnout.evals.stories import DRAWN, STORIES
from turnout.evals.wordmath import extract_answer, generate

COUNT = 6000
DIGEST = "8837d69404a176d15bb2dd38b2055f9c41aab1b315a87b10bbeaa7e15d0cd569"
EQUATION = re.compile(r"[\d(][\d ()+\-*/]* = [\d ()+\-*/=]*\d")
ASSETS = Path(wordmath.__file__).parents[1] / "assets"


@pytest.fixture(scope="module")
def problems() -> dict[str, list[wordmath.Problem]]:
    return {split: generate(split, COUNT, seed=5) for split in wordmath.SPLITS}


def evaluate(expression: str) -> Fraction:
    """`(2 * 30 + 4) / 2` exactly, by Python's own parser."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp), expression
        a, b = value(node.left), value(node.right)
        if isinstance(node.op, ast.Add):
            return a + b
        if isinstance(node.op, ast.Sub):
            return a - b
        if isinstance(node.op, ast.Mult):
            return a * b
        assert isinstance(node.op, ast.Div), expression
        return a / b

    return value(ast.parse(expression.strip(), mode="eval").body)


def test_there_are_many_templates_with_names_of_their_own():
    assert len(STORIES) >= 60
    assert len({story.__name__ for story in STORIES}) == len(STORIES)


def test_every_template_is_drawn_in_both_splits(problems):
    for drawn in problems.values():
        counts = Counter(p.template for p in drawn)
        assert len(counts) == len(STORIES)
        assert min(counts.values()) > COUNT / len(DRAWN) / 3


@pytest.mark.parametrize("split", wordmath.SPLITS)
def test_every_equation_holds_and_leads_to_the_answer(problems, split):
    for p in problems[split]:
        *steps, last = p.answer.split("\n")
        results = []
        for step in steps:
            equation = EQUATION.search(step)
            assert equation, f"{p.template}: no calculation in {step!r}"
            values = {evaluate(side) for side in equation.group().split(" = ")}
            assert len(values) == 1, f"{p.template}: {step}"
            results.append(values.pop())
        assert all(r > 0 and r.denominator == 1 and r < 100_000 for r in results), p.answer
        assert last == f"#### {p.final}"
        assert results[-1] == int(p.final), p.answer


def test_numbers_in_the_steps_come_from_the_question_or_from_earlier_steps(problems):
    words = {"twice": 2, "three": 3, "four": 4, "five": 5, "half": 2, "third": 3, "quarter": 4, "fifth": 5}
    known_facts = {2, 3, 4, 12, 100}  # legs, points of a win, months, percent
    for p in problems["train"]:
        known = {int(n) for n in re.findall(r"\d+", p.question)} | known_facts | {1}
        known |= {words[w] for w in re.findall(r"[a-z]+", p.question.lower()) if w in words}
        for step in p.answer.split("\n")[:-1]:
            equation = EQUATION.search(step).group()
            first = {int(n) for n in re.findall(r"\d+", equation.split(" = ")[0])}
            assert first <= known, f"{p.template}: {first - known} in {step!r} of {p.question!r}"
            known |= {int(n) for n in re.findall(r"\d+", equation)}


def test_splits_share_no_template_with_the_same_numbers():
    def combinations(split: str) -> set[tuple[str, tuple[str, ...]]]:
        drawn = (p for seed in range(2) for p in generate(split, COUNT, seed))
        return {(p.template, tuple(re.findall(r"\d+", p.question))) for p in drawn}

    train, heldout = combinations("train"), combinations("heldout")
    assert len(heldout) > COUNT
    assert not train & heldout


def test_a_seed_names_the_same_problems_on_every_platform():
    """The digest was computed once; a change of templates or draws must renew it, and the model."""
    text = "".join(p.question + p.answer for p in generate("heldout", 500, seed=7))
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST


def test_count_only_says_how_many():
    assert generate("train", 20, seed=3) == generate("train", 50, seed=3)[:20]
    assert generate("train", 20, seed=3) != generate("train", 20, seed=4)
    assert generate("train", 0, seed=3) == []


def test_unknown_split():
    with pytest.raises(ValueError, match="must be one of train, heldout"):
        generate("test", 1, seed=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 7", "7"),
        ("#### 12\nNo, wait.\n#### 13", "13"),
        ("####  -4", "-4"),
        ("#### 1,234.5", "1,234.5"),
        ("#### $18.", "18"),
        ("#### 18.", "18"),
        ("The answer is 7", None),
        ("#### seven", None),
        ("", None),
    ],
)
def test_extract_answer(text, expected):
    assert extract_answer(text) == expected


@pytest.fixture(scope="module", params=["demo", "demo-bf16"])
def tokenizer(request):
    return AutoTokenizer.from_pretrained(ASSETS / request.param)


def test_tokenizer_round_trip(tokenizer, problems):
    for p in problems["heldout"][:300]:
        for text in (p.question, p.answer):
            assert tokenizer.decode(tokenizer(text).input_ids) == text
    for text in ("ünïcode 漢字 🙂", " leading and  double spaces\t\n", "3.14159 * -2e10"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_digit_is_a_token(tokenizer):
    tokens = tokenizer.tokenize("a 1234567890 b98c $55 7%")
    digits = [t for t in tokens if any(c.isdigit() for c in t)]
    assert digits == list("1234567890") + list("98") + list("55") + ["7"]


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(text).input_ids
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.eos_token == "<|im_end|>"
