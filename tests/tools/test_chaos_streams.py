"""What tools.chaos_streams measures of servers whose ranks are killed, and what it takes for a failure."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.serving import tiny_config
from tools import chaos, chaos_streams
from turnout.config import ServerConfig

TOKENS = 80


@pytest.fixture
def config(tiny_folder: Path) -> ServerConfig:
    return tiny_config(tiny_folder, api_key=chaos.KEY, **chaos.MODES["dp2"])


def run(config: ServerConfig, kinds: list[str], seconds: float = 100.0) -> dict[str, Any]:
    until = time.monotonic() + seconds
    return chaos_streams.run(config, clients=8, tokens=TOKENS, kinds=kinds, every=0.2, until=until)


@pytest.mark.more
def test_streams_go_on_and_their_pauses_are_told(config: ServerConfig):
    row = run(config, ["kill", "restart"])
    assert (row["wrong"], row["left_behind"], row["exit_code"]) == ([], {}, 0)
    assert row["compared"] == "token by token"
    assert row["undisturbed_equal"] == [8, 8]
    assert row["answers"] == row["answers_equal"] >= 8
    assert row["resumed_requests"] >= 8
    killed, restarted = row["failures"]
    assert "rank 0 was killed by SIGKILL" in killed["said"]
    assert (killed["rank"], restarted["rank"]) == (0, 1)
    for failure in row["failures"]:
        assert failure["noticed_s"] < failure["ready_s"] < failure["all_go_on_s"]
        pause = failure["pause_s"]
        assert failure["ready_s"] / 2 < pause["least"] <= pause["median"] <= pause["most"]
        assert sum(failure["start_phases_s"].values()) < failure["ready_s"]


@pytest.mark.more
def test_failures_for_which_no_time_is_left(config: ServerConfig):
    row = run(config, ["kill", "stop"], seconds=0.0)
    assert (row["failures"], row["failures_skipped"]) == ([], 2)
    assert chaos_streams.missed(row) == []


@pytest.mark.more
def test_a_server_that_goes_leaves_what_was_measured(config: ServerConfig, monkeypatch: pytest.MonkeyPatch):
    fail_one = chaos_streams.Streams._fail_one

    async def last(self: chaos_streams.Streams, kind: str, number: int) -> None:
        if number:
            self.process.kill()
        await fail_one(self, kind, number)

    monkeypatch.setattr(chaos_streams.Streams, "_fail_one", last)
    row = run(config, ["restart", "restart"])
    assert [failure["kind"] for failure in row["failures"]] == ["restart"]
    assert row["error"].startswith(("ConnectError", "ReadError", "RemoteProtocolError"))
    assert any(line.startswith("error: ") for line in chaos_streams.missed(row))


def test_what_there_is_more_of_is_named():
    before = {"files": 4, "zombies": 1, "threads python": 3, "threads event_engine": 2}
    after = {"files": 4, "zombies": 0, "threads python": 4, "threads event_engine": 3, "threads new": 1}
    assert chaos.more(before, after) == {"threads python": (3, 4), "threads new": (0, 1)}


def test_what_an_answer_may_lack():
    asked = chaos_streams.body(2, 3)
    assert "logprobs" in asked
    scores = {"tokens": ["a", "b", "c"], "text_offset": [0, 1, 2], "token_logprobs": [-1.0, -1.0, -1.0]}
    choice = {"index": 0, "text": "abc", "finish_reason": "length", "logprobs": scores}
    prompt = chaos_streams.PROMPT_TOKENS
    usage = {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}

    def lack(usage: dict[str, int], choices: list[dict[str, Any]]) -> str:
        answer = chaos.Answer()
        answer.add({"choices": choices, "usage": usage})
        return chaos_streams.lacks(answer, asked)

    assert lack(usage, [choice]) == ""
    assert lack(usage | {"completion_tokens": 4}, [choice]).startswith("usage {")
    assert lack(usage, [choice | {"finish_reason": "stop"}]) == "ended with {0: 'stop'}"
    twice = {name: values + values[-1:] for name, values in scores.items()}
    assert lack(usage, [choice | {"logprobs": twice}]) == "4 tokens came, of 3"


def test_the_longest_gap_after_a_failure_is_the_pause():
    client = chaos_streams.Client({}, gaps=[(0.0, 9.0), (9.9, 12.0), (12.5, 13.0)])
    length, end = client.pause(10.0)
    assert (length, end) == pytest.approx((2.1, 2.0))


@pytest.mark.parametrize(
    ("kind", "noticed", "pause", "found"),
    [
        ("kill", 0.9, 15.0, []),
        ("kill", 1.1, 2.0, ["failure 0 was noticed after 1.1 s"]),
        ("stop", 3.1, 15.1, ["a stream paused for 15.1 s at failure 0"]),
    ],
)
def test_what_comes_too_late(kind: str, noticed: float, pause: float, found: list[str]):
    failure = {"kind": kind, "noticed_s": noticed, "pause_s": {"most": pause}}
    row = {"wrong": [], "failures": [failure], "left_behind": {}, "exit_code": 0}
    assert chaos_streams.missed(row) == found
