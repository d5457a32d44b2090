"""What models are calibrated on."""

from __future__ import annotations

import json

import pytest

from turnout.errors import UserError
from turnout.evals import wordmath
from turnout.evals.calibration import load_samples


def test_without_a_file_it_is_the_train_split():
    samples = load_samples(None)
    assert len(samples) == 256
    problem = wordmath.train()[0]
    user, assistant = samples[0]
    assert (user["content"], assistant["content"]) == (problem.question, problem.answer)
    heldout = {p.question for p in wordmath.heldout(4000, seed=0)}
    assert not heldout & {sample[0]["content"] for sample in samples}


def test_lines_of_a_text(tmp_path):
    (tmp_path / "text.txt").write_text("one\n\n  \nzwei é\n")
    assert load_samples(tmp_path / "text.txt") == ["one", "zwei é"]


def test_every_form_of_line(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    records = [
        {"text": "a"},
        {"prompt": "b"},
        {"messages": messages},
        {"question": "q", "answer": "a"},
    ]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, records)))
    answered = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert load_samples(tmp_path / "text.jsonl") == ["a", "b", messages, answered]


@pytest.mark.parametrize(
    "line", ["{", "3", "{}", '{"text": 1}', '{"messages": []}', '{"messages": [{"role": "user"}]}']
)
def test_a_malformed_line_is_named(line, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n' + line)
    with pytest.raises(UserError, match=r"text\.jsonl:2: "):
        load_samples(tmp_path / "text.jsonl")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_samples(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match="holds no text"):
        load_samples(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        load_samples(tmp_path / "latin.txt")
