"""Steps launched before the tokens of the ones before are read: same answers, little wasted, nothing kept.

overlap_soak.py compares as many random requests as asked for.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.overlap_soak import TOYS, compare, compare_ranks, write_family
from tests.engine.test_core import prompts
from tests.engine.toy import ToyModel, collect, engine_plan, make_core, request, run
from tests.ranks import Pools
from tests.tiny import write_tokenizer
from turnout.config import Config
from turnout.engine.overlap_policy import why_no_overlap
from turnout.engine.speculative.switch import DraftSwitch
from turnout.parallel.transfers import HostCopy

MANY_REQUESTS = int(os.environ.get("OVERLAP_REQUESTS", 600))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


def test_random_requests_get_the_same_answers(folder: Path) -> None:
    compared = [compare(name, folder, seed, 20) for seed, name in enumerate(TOYS)]
    assert [found.differing for found in compared] == [[]] * 3
    assert min(found.seen["preemptions"] + found.seen["drafts that held"] for found in compared) > 0


@pytest.mark.more
@pytest.mark.parametrize("name", TOYS)
def test_many_more_random_requests_get_the_same_answers(name: str, folder: Path) -> None:
    seen, done = Counter[str](), 0
    for seed in itertools.count(100):
        compared = compare(name, folder, seed, 60)
        assert compared.differing == [], seed
        seen, done = seen + compared.seen, done + compared.requests
        if 3 * done >= MANY_REQUESTS:
            break
    assert sum(seen[what] for what in ("preemptions", "drafts that held", "with grammars")) > 0


@pytest.mark.more
def test_ranks_that_share_requests_give_the_same_answers_with_drafts(ranks: Pools, tmp_path: Path) -> None:
    write_family("qwen3_moe", tmp_path)
    compared = compare_ranks(ranks(4), tmp_path, seed=1, count=60, dp_size=1)
    assert compared.differing == []
    assert compared.seen["preemptions"] > 0 < compared.seen["drafts that held"]
    assert 0 < compared.overlapped[0].overlapped_steps < compared.overlapped[0].steps
    assert compared.apart[0].overlapped_steps == 0


@pytest.mark.more
def test_ranks_give_the_same_answers(ranks: Pools, tmp_path: Path) -> None:
    write_family("qwen3_moe", tmp_path)
    compared = compare_ranks(ranks(4), tmp_path, seed=1, count=60)
    apart, overlapped = compared.apart, compared.overlapped
    assert compared.differing == []
    assert sum(stats.preemptions for stats in overlapped) > 0
    assert sum(stats.held_steps for stats in apart) == 0 < sum(stats.held_steps for stats in overlapped)
    assert overlapped[0].uneven_steps < apart[0].uneven_steps


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


class Resting(DraftSwitch):
    """Drafts rest in steps that decode as many requests."""

    def __init__(self, rests: int) -> None:
        super().__init__()
        self._rests = rests

    def drafts(self, decoding: int) -> bool:
        return decoding != self._rests


def test_steps_overlap_while_drafts_rest_and_where_none_are_possible() -> None:
    """The first request ends first. Prompts repeat, so that there are drafts whenever they do not rest."""
    asked = [request(str(i), [5, 6] * 4, max_tokens=m, ignore_eos=True) for i, m in enumerate((12, 24))]
    penalised = [request("p", [5, 6] * 4, max_tokens=12, ignore_eos=True, frequency_penalty=0.1)]
    answers, stats = {}, {}
    for rests in (0, 1, 2):
        core = make_core(drafts_rest=True, overlap_schedule="on", speculative_algorithm="ngram")
        core._scheduler.switch = Resting(rests)
        found = run(core, asked)
        answers[rests], stats[rests] = [found[id].token_ids for id in "01"], core.stats()
        before = core.stats()
        run(core, penalised)
        after = core.stats()
        assert after.overlapped_steps - before.overlapped_steps == 12 - 1
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] == [ToyModel().greedy([5, 6] * 4, count, eos=False) for count in (12, 24)]
    assert stats[0].overlapped_steps == 0
    assert stats[0].spec_draft_tokens > stats[1].spec_draft_tokens > 0 < stats[2].spec_draft_tokens
    assert stats[2].overlapped_steps == 12 - 1  # the prompts' and those that decode both, but the last
    assert 0 < stats[1].overlapped_steps <= 12


def test_a_request_left_alone_by_an_abort_has_drafts_of_all_its_tokens() -> None:
    """What was launched while drafts rested is read before the next step is scheduled."""
    model = ToyModel()
    model.head[3:-1] = 0  # a small vocabulary is repeated soon
    core = make_core(model, drafts_rest=True, overlap_schedule="on", speculative_algorithm="ngram")
    core._scheduler.switch = Resting(2)
    for id in "ab":
        core.add(request(id, [5, 6] * 4, max_tokens=24, ignore_eos=True))
    outputs = [output for _ in range(8) for output in core.step()]
    assert core.stats().overlapped_steps == 7
    core.abort(["b"])
    outputs += core.step()
    assert core.stats().overlapped_steps == 7
    assert core.stats().spec_draft_tokens > 0
    while core.has_work():
        outputs += core.step()
    told = [token for output in outputs if output.id == "a" for token in output.token_ids]
    assert told == model.greedy([5, 6] * 4, 24, eos=False)
    assert core.stats().pages_used == 0


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
        ({"overlap_schedule": "on", "speculative_algorithm": "ngram"}, ""),
        ({"overlap_schedule": "on", "speculative_algorithm": "MTP"}, "draft layer"),
    ],
)
def test_the_reason_is_told(flags: dict[str, object], reason: str) -> None:
    plan = engine_plan(Config(**flags), ToyModel().shape, num_pages=8, max_context=32)  # type: ignore[arg-type]
    assert (why_no_overlap(plan) == "") == (reason == "")
    assert reason in why_no_overlap(plan)
