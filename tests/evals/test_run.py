"""`turnout eval` against servers: a stub that knows sums, and a real one with a random model."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.evals.stub import serving
from turnout.cli import app
from turnout.errors import UserError
from turnout.evals.run import EvalOptions
from turnout.evals.score import Accuracy


@pytest.fixture
def sums(tmp_path) -> str:
    """Twenty questions, of which the stub answers 15: it says nothing to 8, and the last 4 are not sums."""
    path = tmp_path / "sums.jsonl"
    records = [{"question": f"{n} + 0", "answer": f"#### {n}"} for n in range(16)]
    records += [{"question": f"{n} + 1", "answer": f"#### {n + 1}"} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def evaluate(*words: object):
    return CliRunner().invoke(app, ["eval", *map(str, words)])


def shell(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turnout.cli", "eval", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_accuracy_interval_and_rate_are_printed(sums):
    with serving() as server:
        done = evaluate("--base-url", server.url, "--task", sums)
    assert done.exit_code == 0, done.output
    flat = " ".join(done.output.split())
    assert f"seed 0: accuracy {Accuracy(15, 20)}; 40 tokens in" in flat
    assert re.search(r"\d+ tokens/s", flat)
    assert "20/20 accuracy 75.0 %" in flat


@pytest.mark.parametrize(("wanted", "code"), [(0.75, 0), (0.76, 1)])
def test_the_exit_code_says_whether_it_was_enough(wanted, code, sums):
    with serving() as server:
        done = evaluate("--base-url", server.url, "--task", sums, "--min-accuracy", wanted)
    assert done.exit_code == code
    assert ("below --min-accuracy" in done.output) == (code == 1)


def test_every_answer_is_written(sums, tmp_path):
    with serving() as server:
        evaluate(
            "--base-url", server.url, "--task", sums, "--output", tmp_path / "out.jsonl", "--repeat", 2
        )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0] * 20 + [1] * 20
    assert [row["question"]["expected"] for row in rows[:3]] == ["0", "1", "2"]
    assert rows[3] == {
        "round": 0,
        "question": {"text": "3 + 0", "expected": "3", "any_number": False},
        "text": "#### 3",
        "correct": True,
        "tokens": 2,
        "seconds": rows[3]["seconds"],
        "finish_reason": "stop",
    }
    assert sum(row["correct"] for row in rows) == 30


def test_repeats_draw_fresh_questions_and_give_mean_and_spread():
    with serving() as server:
        done = evaluate("--base-url", server.url, "--num-questions", 40, "--repeat", 3, "--seed", 5)
    flat = " ".join(done.output.split())
    shares = [float(found) for found in re.findall(r"seed \d: accuracy ([\d.]+) %", flat)]
    assert len(shares) == 3
    mean, spread = statistics.mean(shares), statistics.stdev(shares)
    found = re.search(r"mean of 3: ([\d.]+) % \(standard deviation ([\d.]+)\)", flat)
    assert found, flat
    assert (float(found[1]), float(found[2])) == (
        pytest.approx(mean, abs=0.1),
        pytest.approx(spread, abs=0.1),
    )
    asked = {body["messages"][0]["content"] for body, _ in server.bodies}
    assert len(asked) > 100  # 3 times 40 of 4000


def test_a_real_server_answers(base_url, tmp_path):
    done = shell(
        "--base-url", base_url, "--num-questions", 6, "--max-tokens", 5,
        "--output", tmp_path / "out.jsonl", "--min-accuracy", 0.5,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # a random model knows nothing
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert {row["finish_reason"] for row in rows} <= {"length", "stop"}
    assert all(1 <= row["tokens"] <= 5 for row in rows)


def test_a_server_of_its_own(tiny_folder: Path):
    flags = ["--device", "cpu", "--num-threads", 1, "--speculative-algorithm", "ngram"]
    done = evaluate(tiny_folder, "--num-questions", 3, "--max-tokens", 8, *flags)
    assert done.exit_code == 0, done.output
    printed = " ".join(done.output.split())
    assert "accuracy 0.0 % (0 of 3;" in printed
    accepted, drafted = map(int, re.search(r"drafts accepted: (\d+) of (\d+) \(\d", printed).groups())
    assert 0 <= accepted <= drafted > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base-url", "http://127.0.0.1:9/v1"], "no OpenAI-compatible server answers"),
        (["demo", "--base-url", "http://127.0.0.1:9/v1"], "either MODEL or --base-url"),
        ([], "either MODEL or --base-url"),
        (["demo", "--task", "trivia"], "--task 'trivia'"),
        (["demo", "--repeat", "0"], "--repeat 0: must be at least 1"),
        (["demo", "--min-accuracy", "93"], r"--min-accuracy 93.0: must lie in \[0, 1\]"),
        (["demo", "--output", "/proc/none/out.jsonl"], "--output .*cannot be written"),
        (["/nowhere"], "the server did not start"),
    ],
)
def test_user_errors(words, message):
    done = evaluate(*words, "--num-questions", 1)
    assert isinstance(done.exception, UserError)
    assert re.search(message, str(done.exception)), done.exception


@pytest.mark.parametrize("field", ["num_questions", "max_concurrency", "max_tokens"])
def test_options_out_of_range(field):
    with pytest.raises(UserError, match=f"--{field.replace('_', '-')} -1"):
        EvalOptions(**{field: -1})
