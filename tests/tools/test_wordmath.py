"""The word problems: the same everywhere, never shared between splits, and right."""

from __future__ import annotations

import ast
import hashlib
import lzma
import re
from collections import Counter
from fractions import Fraction

import pytest

from tools.demo import wordmath
from tools.demo.stories import DRAWN, STORIES
from tools.demo.wordmath import FROZEN_HELDOUT, generate, split_of
from turnout.evals import wordmath as shipped

COUNT = 6000
DIGEST = "8837d69404a176d15bb2dd38b2055f9c41aab1b315a87b10bbeaa7e15d0cd569"
EQUATION = re.compile(r"[\d(][\d ()+\-*/]* = [\d ()+\-*/=]*\d")


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


def test_splits_share_no_template_with_the_same_numbers(problems):
    def combinations(split: str) -> set[tuple[str, tuple[str, ...]]]:
        drawn = [*problems[split], *generate(split, COUNT, seed=0)]
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


def test_what_the_package_ships_is_what_the_generator_makes():
    for file, content in wordmath.frozen().items():
        assert lzma.decompress(file.read_bytes()) == lzma.decompress(content)


def test_what_the_package_ships_as_held_out_is():
    """By numbers and template: the generator's own draws tell which template a question is of."""
    drawn = {p.question: p.template for p in generate("heldout", 2 * FROZEN_HELDOUT, wordmath.FROZEN_SEED)}
    asked = shipped.heldout(FROZEN_HELDOUT, seed=0)
    assert len({p.question for p in asked}) == FROZEN_HELDOUT
    assert all(split_of(drawn[p.question], p.question) == "heldout" for p in asked)
