"""Models with recurrent layers: same tokens as a plain loop, whatever the schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.engine.test_cache_groups import asked
from tests.engine.test_core import _drive_at_random, assert_idle, requests_of
from tests.engine.toy import SHAPE, ToyModel, make_core, run
from turnout.attention.kinds import AttentionSpec, DeltaNetSpec

FULL = AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=8)
DELTA = DeltaNetSpec(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, scale=0.25, conv_width=4)
MODELS = {
    "hybrid": (DELTA, DELTA, FULL, DELTA),
    "two kinds of state, and a window": (DELTA, replace(DELTA, num_kv_heads=4), FULL.sliding(6), FULL),
}


def toy(name: str) -> ToyModel:
    return ToyModel(seed=4, shape=replace(SHAPE, attention=MODELS[name]))


@pytest.mark.parametrize(
    ("name", "schedules"),
    [("hybrid", 5), *(pytest.param(name, 60, marks=pytest.mark.more) for name in MODELS)],
)
def test_schedules_never_change_an_answer(name: str, schedules: int) -> None:
    """Chunks, preemption, aborts and slots used again, at random; every survivor equals the plain loop."""
    model, preemptions, aborts = toy(name), 0, 0
    prompts = asked(random.Random(5), 14)
    answers = [model.greedy(prompt, 14) for prompt in prompts]
    for seed in range(schedules):
        draw = random.Random(seed)
        core = make_core(
            model,
            num_pages=draw.choice([16, 20, 64]),
            max_context=60,
            chunked_prefill_size=draw.choice([1, 3, 8, 32]),
            max_prefill_tokens=draw.choice([4, 8, 40]),
            max_running_requests=draw.choice([1, 3, 6]),
            deterministic=draw.random() < 0.2,
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
        assert_idle(core)
        assert core.stats().cached_prompt_tokens == 0
        preemptions += core.stats().preemptions
        aborts += len(aborted)
    assert min(preemptions, aborts) > 0


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
