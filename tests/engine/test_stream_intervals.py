"""Whatever is held back, every request gets what it would have got, its first token at once."""

from __future__ import annotations

import random

import pytest

from turnout.engine.messages import Abort, AddRequest, RequestOutput, TokenLogprobs, apart, as_one
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.stream_intervals import StreamIntervals


def asked(id: str, interval: int) -> AddRequest:
    return AddRequest(id=id, prompt_ids=[1], sampling=SamplingParams(), stream_interval=interval)


def answer(id: str, tokens: int, rng: random.Random, *, drafts: bool) -> list[RequestOutput]:
    """The outputs of a request, one of each step that gives it tokens."""
    found, at = [], 0
    while at < tokens:
        size = 1 if at == 0 or not drafts else rng.randint(1, 3)
        ids = list(range(at, min(at + size, tokens)))
        logprobs = [TokenLogprobs(token, -1.0, 1, []) for token in ids]
        found.append(RequestOutput(id=id, token_ids=ids, logprobs=logprobs))
        at += size
    found[0].waited, found[0].cached_tokens, found[0].prompt_logprobs = (0.1, 0.2), 3, [None]
    found[-1].finish_reason, found[-1].stop_token = "stop", tokens - 1
    return found


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_all_tokens_arrive_together(seed: int, drafts: bool):
    rng = random.Random(seed)
    intervals = StreamIntervals()
    asks = {f"r{i}": rng.choice([1, 2, 4, 7]) for i in range(12)}
    lengths = {id: rng.randint(1, 30) for id in asks}
    waiting = {id: answer(id, lengths[id], rng, drafts=drafts) for id in asks}
    for id, interval in asks.items():
        intervals.note(asked(id, interval))
    sent: dict[str, list[RequestOutput]] = {id: [] for id in asks}
    steps = 0
    while waiting:
        chosen = rng.sample(sorted(waiting), rng.randint(1, len(waiting)))
        outputs = [waiting[id].pop(0) for id in chosen]
        waiting = {id: left for id, left in waiting.items() if left}
        steps += 1
        for output in intervals.due(outputs):
            sent[output.id].append(output)
    assert steps > 1
    for id, interval in asks.items():
        whole = as_one(sent[id])
        assert whole.token_ids == list(range(lengths[id]))
        assert [one.token_id for one in whole.logprobs or ()] == whole.token_ids
        assert (whole.finish_reason, whole.stop_token) == ("stop", lengths[id] - 1)
        assert (whole.waited, whole.cached_tokens, whole.prompt_logprobs) == ((0.1, 0.2), 3, [None])
        sizes = [len(output.token_ids) for output in sent[id]]
        assert sizes[0] == 1
        most = interval - 1 + (3 if drafts else 1)
        assert all(interval <= size <= most for size in sizes[1:-1])
    assert not intervals._interval
    assert not intervals._held


def test_what_was_held_comes_before_an_error_and_nothing_after_an_abort():
    intervals = StreamIntervals()
    for id in "ab":
        intervals.note(asked(id, 8))
    first = [RequestOutput(id=id, token_ids=[0], waited=(0.0, 0.0)) for id in "ab"]
    assert intervals.due(first) == first
    assert intervals.due([RequestOutput(id=id, token_ids=[1]) for id in "ab"]) == []
    intervals.note(Abort(["a"]))
    broken = RequestOutput(id="b", finish_reason="error", error="it broke")
    ended = RequestOutput(id="a", finish_reason="abort")
    assert intervals.due([ended, broken]) == [ended, RequestOutput(id="b", token_ids=[1]), broken]
    assert not intervals._interval
    assert not intervals._held


def test_a_request_that_goes_on_elsewhere_gets_its_first_token_there_at_once():
    """Its engine was lost: what the next one gives first says how long it waited."""
    intervals = StreamIntervals()
    intervals.note(asked("a", 5))
    taken_over = RequestOutput(id="a", token_ids=[7], waited=(0.0, 0.1))
    assert intervals.due([taken_over]) == [taken_over]


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
def test_apart_and_together_again(tokens: int):
    output = RequestOutput(
        id="a",
        token_ids=list(range(tokens)),
        logprobs=[TokenLogprobs(token, -1.0, 1, []) for token in range(tokens)],
        prompt_logprobs=[None],
        cached_tokens=2,
        waited=(0.0, 1.0),
        finish_reason="length",
    )
    singles = apart(output)
    assert [len(one.token_ids) for one in singles] == [1] * tokens or tokens == 0
    assert as_one(singles) == output
