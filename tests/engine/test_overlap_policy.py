"""Steps launched before the tokens of the ones before are read: same answers, little wasted, nothing kept."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from tests.engine.test_core import assert_idle, prompts
from tests.engine.toy import ToyModel, collect, engine_plan, make_core, merge, request, run
from turnout.config import Config
from turnout.engine.core import EngineCore
from turnout.engine.messages import RequestOutput
from turnout.engine.overlap_policy import why_no_overlap
from turnout.engine.transfers import HostCopy

MANY_REQUESTS = int(os.environ.get("OVERLAP_REQUESTS", 1000))


def sampling(draw: random.Random) -> dict[str, object]:
    """Some of the fields that change what is drawn, or what is said about it."""
    fields = {
        "temperature": [0.0, 0.0, 0.7, 1.5],
        "seed": [None, 11],
        "top_k": [0, 3],
        "top_p": [1.0, 0.8],
        "min_p": [0.0, 0.05],
        "logprobs": [None, None, 0, 3],
        "prompt_logprobs": [None, None, 1],
        "presence_penalty": [0.0, 0.8],
        "frequency_penalty": [0.0, 0.5],
        "repetition_penalty": [1.0, 1.3],
        "logit_bias": [{}, {4: 3.0}],
        "min_tokens": [0, 3],
        "max_tokens": [0, 1, 2, 9, 20],
        "stop_token_ids": [(), (7, 8, 9)],
        "ignore_eos": [False, True],
    }
    chosen = {name: draw.choice(values) for name, values in fields.items() if draw.random() < 0.5}
    if chosen.get("min_tokens"):
        chosen["max_tokens"] = 12
    if chosen.get("logprobs") is not None and draw.random() < 0.3:
        chosen["logprob_token_ids"] = (1, 5)
    return chosen


def answers(seed: int, count: int, overlap: str) -> tuple[dict[str, RequestOutput], EngineCore]:
    """Requests that come at random, over few pages, some of them aborted before a token is known."""
    draw = random.Random(seed)
    core = make_core(
        ToyModel(seed=1),
        num_pages=draw.choice([14, 24, 64]),
        max_context=48,
        chunked_prefill_size=draw.choice([1, 3, 16]),
        max_prefill_tokens=draw.choice([4, 40]),
        max_running_requests=draw.choice([1, 3, 8]),
        disable_prefix_cache=draw.random() < 0.3,
        scheduling_policy=draw.choice(["fcfs", "priority"]),
        overlap_schedule=overlap,
    )
    # Without a seed of its own a request's draws depend on how many came before: alike in both.
    asked = [request(str(i), p, **sampling(draw)) for i, p in enumerate(prompts(count, seed=seed, high=24))]
    asked = [msgspec.structs.replace(message, priority=draw.randint(-2, 2)) for message in asked]
    doomed = {message.id for message in asked if draw.random() < 0.05}
    arrivals = random.Random(seed)
    found: dict[str, RequestOutput] = {}
    waiting = asked[::-1]
    while waiting or core.has_work():
        for _ in range(min(len(waiting), arrivals.choice([0, 1, 5]))):
            core.add(waiting.pop())
        if arrivals.random() < 0.3:
            core.abort(list(doomed & set(core._requests)))
        for output in core.step():
            merge(found, output)
    assert_idle(core)
    return {id: output for id, output in found.items() if id not in doomed}, core


def assert_equal_answers(seed: int, count: int) -> int:
    apart, _ = answers(seed, count, "off")
    overlapped, core = answers(seed, count, "on")
    assert core.info()["overlap_schedule"] == "on"
    assert overlapped.keys() == apart.keys()
    for id, output in apart.items():
        other = overlapped[id]
        assert (other.token_ids, other.finish_reason, other.stop_token, other.error) == (
            output.token_ids,
            output.finish_reason,
            output.stop_token,
            output.error,
        ), f"schedule {seed}, request {id}"
        for ours, theirs in (
            (other.logprobs, output.logprobs),
            (other.prompt_logprobs, output.prompt_logprobs),
        ):
            assert (ours is None) == (theirs is None)
            for a, b in zip(ours or [], theirs or [], strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert (a.token_id, a.rank) == (b.token_id, b.rank)
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    return core.stats().preemptions


def test_random_requests_get_the_same_answers() -> None:
    assert sum(assert_equal_answers(seed, 40) for seed in range(4)) > 0


@pytest.mark.more
def test_many_more_random_requests_get_the_same_answers() -> None:
    """OVERLAP_REQUESTS=10000 takes five minutes and more: with --timeout 0."""
    preempted = [assert_equal_answers(seed, 100) for seed in range(100, 100 + MANY_REQUESTS // 100)]
    assert sum(preempted) > len(preempted)


def test_tokens_are_read_while_the_next_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Watched(ToyModel):
        def forward(self, step):
            events.append("forward")
            return super().forward(step)

    read = HostCopy.tolist
    monkeypatch.setattr(HostCopy, "tolist", lambda self: (events.append("read"), read(self))[1])
    asked = [request("a", [1, 2, 3], max_tokens=6, ignore_eos=True)]
    run(make_core(Watched(), overlap_schedule="on"), asked)
    assert events == ["forward"] + ["forward", "read"] * 5 + ["read"]
    events.clear()
    run(make_core(Watched(), overlap_schedule="off"), asked)
    assert events == ["forward", "read"] * 6


def test_a_request_that_ends_wastes_one_row_at_most_and_none_at_its_maximum() -> None:
    def rows(overlap: str, **fields: object) -> tuple[int, int]:
        model = ToyModel(seed=1)
        core = make_core(model, overlap_schedule=overlap, disable_prefix_cache=True)
        found = run(core, [request(str(i), p, **fields) for i, p in enumerate(prompts(12, seed=3))])
        return sum(model.steps), sum(output.finish_reason == "stop" for output in found.values())

    stops = {"max_tokens": 30, "stop_token_ids": tuple(range(0, 50, 3))}
    (apart, ended), (overlapped, _) = rows("off", **stops), rows("on", **stops)
    assert ended > 6
    assert overlapped == apart + ended
    limited = {"max_tokens": 5, "ignore_eos": True}
    assert rows("on", **limited) == rows("off", **limited)


def test_an_abort_frees_pages_at_once_and_its_token_is_never_told() -> None:
    core = make_core(overlap_schedule="on")
    for i, prompt in enumerate(prompts(6, low=8)):
        core.add(request(str(i), prompt, max_tokens=50, ignore_eos=True))
    for _ in range(5):
        core.step()
    core.abort([str(i) for i in range(6)])
    assert core.stats().pages_used == 0
    assert {output.finish_reason for output in core.step()} == {"abort"}
    assert not core.has_work()
    core.add(request("next", [1, 2], max_tokens=3, ignore_eos=True))
    assert collect(core)["next"].token_ids == ToyModel().greedy([1, 2], 3, eos=False)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"overlap_schedule": "on"}, ""),
        ({"overlap_schedule": "off"}, "--overlap-schedule off"),
        ({"disable_overlap_schedule": True}, "--disable-overlap-schedule"),
        ({}, "auto: on a CPU"),
        ({"overlap_schedule": "on", "deterministic": True}, "--deterministic"),
        ({"overlap_schedule": "on", "speculative_algorithm": "ngram"}, "drafts"),
    ],
)
def test_the_reason_is_told(flags: dict[str, object], reason: str) -> None:
    plan = engine_plan(Config(**flags), ToyModel().shape, num_pages=8, max_context=32)  # type: ignore[arg-type]
    assert (why_no_overlap(plan) == "") == (reason == "")
    assert reason in why_no_overlap(plan)
