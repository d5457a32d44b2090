"""Models whose layers keep different parts of a context: same tokens as a plain loop, whatever the schedule.

Layers with windows and sinks share the toy model with layers of full attention, in two or three cache groups.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.engine.test_core import _drive_at_random, assert_idle, requests_of
from tests.engine.toy import SHAPE, ToyModel, make_core, request, run
from turnout.attention.kinds import AttentionSpec, cache_groups
from turnout.engine.core import EngineCore

FULL = AttentionSpec.full(num_heads=4, num_kv_heads=2, head_dim=8)
SINKS = replace(FULL, sinks=True)
MODELS = {
    "alternating": (SINKS.sliding(6), SINKS, SINKS.sliding(6), SINKS),
    "windows only": (FULL.sliding(9), FULL.sliding(9)),
    "two windows and other heads": (FULL.sliding(5), replace(FULL, num_kv_heads=1), SINKS.sliding(11)),
}


def toy(name: str) -> ToyModel:
    return ToyModel(seed=3, shape=replace(SHAPE, attention=MODELS[name]))


def asked(
    draw: random.Random,
    count: int,
    *,
    shared: Sequence[int] = (0, 8, 16, 23, 26),
    longest: int = 44,
) -> list[list[int]]:
    """Prompts some of which begin alike, in so many tokens, and some of which repeat themselves, so that
    drafts hold."""
    begin = [draw.randrange(49) for _ in range(max(shared))]
    prompts = []
    for _ in range(count):
        own = [draw.randrange(49) for _ in range(draw.randint(1, 12))] * draw.choice([1, 1, 3])
        prompts.append((begin[: draw.choice(shared)] + own)[:longest])
    return prompts


@pytest.mark.parametrize(
    "name", ["alternating", *(pytest.param(name, marks=pytest.mark.more) for name in [*MODELS][1:])]
)
def test_schedules_never_change_an_answer(name: str) -> None:
    """Prefix hits, chunks, preemption, aborts and drafts at random; every survivor equals the plain loop."""
    model, hits, preemptions, accepted = toy(name), 0, 0, 0
    prompts = asked(random.Random(5), 14)
    answers = [model.greedy(prompt, 14) for prompt in prompts]
    for seed in range(6):
        draw = random.Random(seed)
        core = make_core(
            model,
            num_pages=draw.choice([16, 20, 64]),
            max_context=60,
            chunked_prefill_size=draw.choice([1, 3, 8, 32]),
            max_prefill_tokens=draw.choice([4, 8, 40]),
            max_running_requests=draw.choice([1, 3, 6]),
            disable_prefix_cache=draw.random() < 0.2,
            speculative_algorithm=draw.choice(["none", "ngram"]),
        )
        got, aborted = _drive_at_random(core, prompts, draw)
        for i, answer in enumerate(answers):
            tokens = got[str(i)].token_ids
            assert tokens == (answer[: len(tokens)] if i in aborted else answer), (
                f"schedule {seed}, request {i}"
            )
        assert_idle(core)
        stats = core.stats()
        hits += stats.cached_prompt_tokens
        preemptions += stats.preemptions
        accepted += stats.spec_accepted_tokens
    assert min(hits, accepted) > 0
    assert preemptions > 0 or name == "windows only"  # whose contexts take few pages however long they are


def held(core: EngineCore) -> list[int]:
    return [pool.num_live for pool in core._scheduler.kv.pools]


def test_pages_below_a_window_are_freed_and_found_again() -> None:
    """A context of 40 tokens keeps ten pages of full attention and three of a window of 6."""
    model = toy("alternating")
    core = make_core(model, num_pages=64, max_prefill_tokens=8, max_running_requests=2)
    full, window = core._scheduler.kv.pools
    assert window.num_pages < full.num_pages
    prompt = asked(random.Random(1), 1)[0][:1] * 4 + list(range(36))
    core.add(request("a", prompt, max_tokens=9, ignore_eos=True))
    while not core._scheduler.running or core._scheduler.running[0].num_output < 2:
        core.step()
        assert held(core)[1] <= 4
    assert held(core)[0] >= 10
    while core.has_work():
        core.step()
    again = run(core, [request("b", prompt, max_tokens=9, ignore_eos=True)])["b"]
    assert again.cached_tokens == 36
    assert again.token_ids == model.greedy(prompt, 9, eos=False)
    # Without what the window needs, the pages of full attention alone are no prefix.
    window.allocate(window.num_available)
    assert core._scheduler.kv._known_prefix(_started(prompt))[0] == 0


def test_long_contexts_run_together_in_planned_pages() -> None:
    """Eight contexts of 512 tokens, a window of 4 in half of the layers: none is put back, in 0.56 of the
    bytes that these layers take without a window."""
    layers = (SINKS.sliding(4), SINKS) * 2
    shape = replace(SHAPE, attention=layers, max_position_embeddings=512)
    model = ToyModel(seed=3, shape=shape)
    sizes = {"num_pages": 8 * 128, "max_context": 512, "max_prefill_tokens": 64}
    core = make_core(model, **sizes)
    plan = core.engine_plan
    whole = make_core(ToyModel(shape=replace(shape, attention=(SINKS,) * 4)), **sizes)
    spare = [sum(4 * group.token_bytes(4) for group in c.engine_plan.cache_groups) for c in (core, whole)]
    taken, without = (c._attention.cache_bytes - s for c, s in zip((core, whole), spare, strict=True))
    assert sum(plan.group_bytes(8 * 128, plan.budget)) == taken <= 0.56 * without
    draw = random.Random(2)
    prompts = [[draw.randrange(49) for _ in range(400)] for _ in range(8)]
    for i, prompt in enumerate(prompts):
        core.add(request(str(i), prompt, max_tokens=112, ignore_eos=True))
    most, together, got = [0, 0], 0, {str(i): [] for i in range(8)}
    while core.has_work():
        for output in core.step():
            got[output.id] += output.token_ids
        most = [max(pages) for pages in zip(most, held(core), strict=True)]
        if all(0 < len(tokens) < 112 for tokens in got.values()):  # a window of 4 tokens lies in two pages
            assert 8 <= held(core)[1] <= 8 * 2
            together += 1
    assert together > 40
    assert most[0] > 0.9 * 8 * 128  # nearly all contexts were long at the same time
    assert core.stats().preemptions == 0
    assert got["7"][:9] == model.greedy(prompts[7], 9, eos=False)


def _started(prompt: list[int]):
    from turnout.engine.scheduler.request import Request

    return Request.start(request("c", prompt, max_tokens=1), seed=0, eos_token_ids=())


def test_cached_bytes_are_those_of_the_groups() -> None:
    core = make_core(toy("two windows and other heads"), num_pages=64, max_prefill_tokens=8)
    plan = core.engine_plan
    assert [group.layers for group in plan.cache_groups] == [(1,), (0,), (2,)]
    spare = sum(4 * group.token_bytes(4) for group in plan.cache_groups)  # a page of each, for padding
    assert core._attention.cache_bytes == sum(plan.group_bytes(64, plan.budget)) + spare
    assert plan.describe()["kv"]["groups"][1]["window"] == 5


def test_near_ties_are_decided_over_windows_too() -> None:
    """Every token has a twin whose logit differs in the last bits only."""
    model = toy("alternating")
    model.head[25:] = model.head[:25] * (1 + 1e-7 * torch.randn(25, 32))
    prompts, seen = asked(random.Random(7), 6), []
    for flags in ({"max_running_requests": 1}, {}, {"chunked_prefill_size": 3}):
        got = run(make_core(model, **flags), requests_of(prompts, max_tokens=8, ignore_eos=True))
        seen.append([got[str(i)].token_ids for i in range(len(prompts))])
    assert all(answers == seen[0] for answers in seen)


def test_layers_alike_but_for_their_rope_share_a_group() -> None:
    groups = cache_groups([FULL.sliding(4), FULL, replace(FULL, rope="other"), SINKS])
    assert [group.layers for group in groups] == [(1, 2), (3,), (0,)]
