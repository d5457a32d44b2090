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
from turnout.engine.transfers import HostCopy

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
