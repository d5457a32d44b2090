"""The word problems that ship: drawn alike everywhere, read as they are written; and the demo's tokenizer."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from turnout.checkpoint.locate import locate
from turnout.errors import UserError
from turnout.evals.wordmath import extract_answer, heldout, train


def test_a_seed_names_the_same_questions():
    assert heldout(20, seed=3) == heldout(50, seed=3)[:20]
    assert heldout(20, seed=3) != heldout(20, seed=4)
    assert [p.final for p in heldout(3, seed=7)] == ["397", "462", "6"]
    assert len({p.question for p in heldout(1000, seed=5)}) == 1000
    assert not {p.question for p in heldout(4000, seed=0)} & {p.question for p in train()}


def test_more_questions_than_there_are():
    with pytest.raises(UserError, match="4001 questions of wordmath: there are 4000"):
        heldout(4001, seed=0)


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


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(locate("demo"))


def test_tokenizer_round_trip(tokenizer):
    for p in train():
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
