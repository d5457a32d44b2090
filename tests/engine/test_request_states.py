"""Models with recurrent layers: same tokens as a plain loop, whatever the schedule.

`python -m tests.engine.test_request_states 5000` sends each model as many requests, and prints what happened.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.engine.test_cache_groups import asked
from tests.engine.test_core import _drive_at_random, assert_idle, requests_of
from tests.engine.toy import SHAPE, ToyModel, make_core, request, run
from turnout.attention.kinds import AttentionSpec, DeltaNetSpec
from turnout.engine.scheduler.snapshots import SnapshotPool

FULL = AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=8)
DELTA = DeltaNetSpec(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, scale=0.25, conv_width=4)
MODELS = {
    "hybrid": (DELTA, DELTA, FULL, DELTA),
    "two kinds of state, and a window": (DELTA, replace(DELTA, num_kv_heads=4), FULL.sliding(6), FULL),
}


VOCABULARY = 16  # so small that a random draft layer foretells some tokens
PROMPTS, ROUND = 14, 36  # of a schedule; schedules with the same prompts
NGRAM: list[dict[str, object]] = [
    {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": count} for count in (2, 4, 6)
]
MTP: list[dict[str, object]] = [
    {"speculative_algorithm": "MTP", "speculative_num_steps": count} for count in (1, 2, 4)
]
FLAGS: list[dict[str, object]] = [
    {},
    {"deterministic": True},
    *(flags for pair in zip(NGRAM, MTP, strict=True) for flags in pair),
]


def toy(name: str) -> ToyModel:
    return ToyModel(seed=4, shape=replace(SHAPE, attention=MODELS[name]))


def drafting(name: str) -> ToyModel:
    """With a draft layer behind the layers of its name."""
    layers = (*MODELS[name], FULL)
    shape = replace(SHAPE, attention=layers, vocab_size=VOCABULARY, eos_token_ids=(VOCABULARY - 1,))
    return ToyModel(seed=4, shape=shape, drafts=True)


@pytest.mark.parametrize(
    ("name", "schedules"),
    [("hybrid", 6), *(pytest.param(name, 30, marks=pytest.mark.more) for name in MODELS)],
)
def test_schedules_never_change_an_answer(name: str, schedules: int) -> None:
    assert min(drive(name, schedules).values()) > 0


def drive(name: str, schedules: int, first: int = 0) -> Counter[str]:
    """Prefix hits, chunks, drafts of both kinds, preemption, aborts, slots used again: survivors equal the
    plain loop. Returns how often what happened."""
    model, seen = drafting(name), Counter[str]()
    for seed in range(first, first + schedules):
        draw = random.Random(seed)
        if seed % ROUND == 0 or seed == first:
            prompts = asked(random.Random(5 + seed // ROUND), PROMPTS)
            prompts = [[token % (VOCABULARY - 1) for token in prompt] for prompt in prompts]
            answers = [model.greedy(prompt, 14) for prompt in prompts]
        interval, flags = draw.choice([0, 4, 8, 8]), FLAGS[seed % len(FLAGS)]
        core = make_core(
            model,
            state_snapshot_interval=interval,
            num_pages=draw.choice([16, 20, 64]),
            max_context=60,
            chunked_prefill_size=draw.choice([1, 3, 8, 32]),
            max_prefill_tokens=draw.choice([4, 8, 40]),
            max_running_requests=draw.choice([1, 3, 6]),
            **flags,
        )
        for states in core._attention.states:  # whatever is left there must never be read
            states.states.fill_(float("nan"))
            states.windows.fill_(float("nan"))
        got, aborted = _drive_at_random(core, prompts, draw)
        for i, answer in enumerate(answers):
            tokens = got[str(i)].token_ids
            assert tokens == (answer[: len(tokens)] if i in aborted else answer), (
                f"schedule {seed}, request {i}"
            )
            seen["tokens"] += len(tokens)
        assert_idle(core)
        stats = core.stats()
        assert interval or stats.cached_prompt_tokens == 0
        kind = flags.get("speculative_algorithm", "none")
        if kind != "none":
            seen[f"{kind} drafts that held"] += stats.spec_accepted_tokens
            seen[f"{kind} drafts that did not"] += stats.spec_draft_tokens - stats.spec_accepted_tokens
        seen["prompt tokens from snapshots"] += stats.cached_prompt_tokens
        seen["preemptions"] += stats.preemptions
        seen["aborts"] += len(aborted)
        seen["requests"] += PROMPTS
    return seen


def test_near_ties_are_decided_over_states_too() -> None:
    """Every token has a twin whose logit differs in the last bits only."""
    model = toy("hybrid")
    model.head[25:] = model.head[:25] * (1 + 1e-7 * torch.randn(25, 32))
    prompts, seen = asked(random.Random(7), 6), []
    for flags in ({"max_running_requests": 1}, {}, {"chunked_prefill_size": 3}):
        core = make_core(model, overlap_schedule="on", **flags)
        assert core.info()["overlap_schedule"].startswith("a near-tie decided late")
        got = run(core, requests_of(prompts, max_tokens=8, ignore_eos=True))
        seen.append([got[str(i)].token_ids for i in range(len(prompts))])
    assert all(answers == seen[0] for answers in seen)


def test_slots_take_what_the_plan_says() -> None:
    core = make_core(toy("two kinds of state, and a window"), max_running_requests=5)
    assert core._attention.state_bytes == 6 * core.engine_plan.request_bytes
    assert core.info()["state_bytes"] == 6 * core.engine_plan.request_bytes
    kinds = core.engine_plan.describe()["kv"]["states"]
    assert [(kind["layers"], kind["num_slots"]) for kind in kinds] == [(1, 5), (1, 5)]


def test_a_request_has_a_state_for_each_draft() -> None:
    flags = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}
    core = make_core(toy("hybrid"), max_running_requests=5, state_snapshot_interval=4, **flags)
    assert core.info()["state_bytes"] == (5 * 4 + 1 + 5) * core.engine_plan.request_bytes
    (kind,) = core.engine_plan.describe()["kv"]["states"]
    assert kind["num_slots"] == 20


def finished(core, id: str, prompt: list[int]):
    return run(core, [request(id, prompt, max_tokens=6, ignore_eos=True)])[id]


def test_a_prefix_is_reused_where_pages_and_a_snapshot_are() -> None:
    """Prompts of 22 tokens with snapshots every 8: after 8, 16 and, while decoding, 24."""
    model = toy("hybrid")
    core = make_core(model, state_snapshot_interval=8, max_running_requests=2)
    kv = core._scheduler.kv
    prompt = [i % 49 for i in range(5, 27)]
    first = finished(core, "a", prompt)
    assert len(kv.snapshots) == 2  # of as many as requests that run: the one after 8 made room
    assert finished(core, "b", prompt).cached_tokens == 16
    longer = prompt + first.token_ids
    again = finished(core, "c", longer)
    assert (again.cached_tokens, again.token_ids) == (24, model.greedy(longer, 6, eos=False))
    core.reset_prefix_cache()
    assert finished(core, "d", prompt).cached_tokens == 0
    # Without the pages of attention a snapshot alone is no prefix, nor are these without it.
    kv.pools[0].forget()
    assert finished(core, "e", prompt).cached_tokens == 0
    kv.snapshots.forget()
    assert finished(core, "f", prompt).cached_tokens == 0
    assert finished(core, "g", prompt).token_ids == first.token_ids == model.greedy(prompt, 6, eos=False)


def test_snapshots_are_planned() -> None:
    core = make_core(toy("hybrid"), state_snapshot_interval=4, max_running_requests=5)
    assert core.engine_plan.num_snapshots == 5
    assert core._attention.state_bytes == (5 + 1 + 5) * core.engine_plan.request_bytes


def test_the_snapshot_used_longest_ago_makes_room() -> None:
    pool = SnapshotPool(8, range(4, 6))
    pool.save(b"a", 0)
    pool.save(b"b", 1)
    pool.restore(b"a", 2)
    pool.save(b"c", 1)
    assert (b"a" in pool, b"b" in pool, b"c" in pool) == (True, False, True)
    assert pool.take_copies() == [(0, 4), (1, 5), (4, 2), (1, 5)]
    pool.save(b"c", 0)
    assert pool.take_copies() == []
    pool.forget()
    assert len(pool) == 0


if __name__ == "__main__":
    for name in MODELS:
        print(name, dict(drive(name, -(-int(sys.argv[1]) // PROMPTS))), flush=True)
