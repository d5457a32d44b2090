"""The engine over a toy model: same tokens as a plain loop, whatever the schedule; nothing leaks."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from tests.engine.toy import ToyModel, collect, make_core, merge, request, run
from turnout.engine.core import EngineCore
from turnout.engine.messages import AddRequest, RequestOutput
from turnout.errors import UserError


def prompts(count: int, seed: int = 0, *, low: int = 1, high: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(49) for _ in range(draw.randint(low, high))] for _ in range(count)]


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
    assert not core.has_work()


def requests_of(asked: list[list[int]], **sampling: object) -> list[AddRequest]:
    return [request(str(i), prompt, **sampling) for i, prompt in enumerate(asked)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 64])
def test_greedy_equals_a_plain_loop_for_every_chunk_size(chunk: int) -> None:
    model = ToyModel()
    core = make_core(model, chunked_prefill_size=chunk, max_prefill_tokens=max(chunk, 8))
    asked = prompts(12)
    got = run(core, requests_of(asked, max_tokens=12))
    for i, prompt in enumerate(asked):
        assert got[str(i)].token_ids == model.greedy(prompt, 12)
    assert_idle(core)


def test_stop_reasons() -> None:
    got = run(make_core(), requests_of(prompts(16), max_tokens=60))
    for output in got.values():
        ended = output.token_ids[-1] == 49
        assert output.finish_reason == ("stop" if ended else "length")
        assert output.stop_token == (49 if ended else None)
        assert ended or len(output.token_ids) == 60
    assert {o.finish_reason for o in got.values()} == {"stop", "length"}


def test_no_step_holds_more_tokens_than_the_budget() -> None:
    model = ToyModel()
    core = make_core(model, chunked_prefill_size=16, max_prefill_tokens=24, max_running_requests=8)
    run(core, requests_of(prompts(20, low=20), max_tokens=9))
    assert max(model.steps) <= 24


@pytest.mark.parametrize("num_pages", [12, 16, 24])
def test_preempted_requests_get_what_they_would_have_got(num_pages: int) -> None:
    model = ToyModel()
    core = make_core(model, num_pages=num_pages, max_context=48)
    asked = prompts(16, seed=3, low=1, high=12)
    got = run(core, requests_of(asked, max_tokens=30, ignore_eos=True))
    assert core.stats().preemptions > 0
    for i, prompt in enumerate(asked):
        assert got[str(i)].token_ids == model.greedy(prompt, 30, eos=False)
    assert_idle(core)


def test_preempted_sampling_scores_and_counts_are_unchanged() -> None:
    asked = prompts(16, seed=5, low=4, high=20)
    wanted = {
        "max_tokens": 24,
        "ignore_eos": True,
        "temperature": 0.9,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "frequency_penalty": 0.5,
    }
    roomy = run(make_core(), requests_of(asked, seed=7, **wanted))
    core = make_core(num_pages=12, max_context=48)
    tight = run(core, requests_of(asked, seed=7, **wanted))
    assert core.stats().preemptions > 0
    assert core.stats().generation_tokens == 16 * 24
    assert core.stats().prompt_tokens == sum(map(len, asked))
    for i in map(str, range(16)):
        assert tight[i].token_ids == roomy[i].token_ids
        assert_same_scores(tight[i], roomy[i])


def assert_same_scores(a: RequestOutput, b: RequestOutput) -> None:
    for one, other in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
        assert one is not None
        assert other is not None
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            if x is None or y is None:
                assert x is y
                continue
            assert (x.token_id, x.rank) == (y.token_id, y.rank)
            assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
            assert [t for t, _ in x.top] == [t for t, _ in y.top]


def test_a_prompt_preempted_while_it_is_scored_is_scored_once() -> None:
    """The older request's decoding takes the pages of a prompt that is computed two tokens at a time."""
    flags = {"num_pages": 12, "max_context": 44, "chunked_prefill_size": 2, "disable_prefix_cache": True}
    old, new = prompts(2, seed=1, low=20, high=20)
    core = make_core(**flags)
    core.add(request("old", old[:12], max_tokens=30, ignore_eos=True))
    for _ in range(8):
        core.step()
    core.add(request("new", new, max_tokens=2, ignore_eos=True, prompt_logprobs=1))
    core.step()
    core.step()
    preempted = core._scheduler._preempt_latest()
    assert preempted.id == "new"
    assert preempted.prompt_logprobs is not None
    assert 1 < len(preempted.prompt_logprobs) < 20
    got = collect(core)["new"]
    alone = run(make_core(), [request("new", new, max_tokens=2, ignore_eos=True, prompt_logprobs=1)])["new"]
    assert got.prompt_logprobs is not None
    assert alone.prompt_logprobs is not None
    assert len(got.prompt_logprobs) == len(alone.prompt_logprobs) == 20
    for one, other in zip(got.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        assert one is not None
        assert other is not None
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def resumed(message: AddRequest, output_ids: list[int]) -> AddRequest:
    return msgspec.structs.replace(message, output_ids=output_ids)


RESUMED: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 5, "top_p": 0.9, "min_p": 0.01},
    "scores": {"temperature": 0.7, "seed": -3, "logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {3: 5.0, 7: -5.0}, "temperature": 0.5, "seed": 1},
    "minimum": {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(20, 49))},
}


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("kind", RESUMED)
def test_a_request_resumed_on_another_engine_gets_what_it_would_have_got(kind: str, drafts: int) -> None:
    """From after each of its tokens, with others in the batch."""
    flags: dict[str, object] = {"max_running_requests": 16}
    if drafts:
        flags |= {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": drafts}
    asked = prompts(3, seed=11, low=6, high=30)
    wanted: dict[str, object] = {"max_tokens": 14, "ignore_eos": True} | RESUMED[kind]
    whole = run(make_core(**flags), requests_of(asked, **wanted))
    longest = max(len(output.token_ids) for output in whole.values())
    assert longest >= 9
    core = make_core(**flags)
    for cut in range(1, longest):
        left = [
            resumed(message, whole[message.id].token_ids[:cut])
            for message in requests_of(asked, **wanted)
            if cut < len(whole[message.id].token_ids)
        ]
        before = core.stats()
        got = run(core, left)
        after = core.stats()
        rest = {message.id: whole[message.id].token_ids[cut:] for message in left}
        assert {id: output.token_ids for id, output in got.items()} == rest
        assert after.prompt_tokens == before.prompt_tokens  # counted where they were first answered
        assert after.generation_tokens - before.generation_tokens == sum(map(len, rest.values()))
        for id, output in got.items():
            assert (output.finish_reason, output.stop_token) == (
                whole[id].finish_reason,
                whole[id].stop_token,
            )
            assert output.prompt_logprobs is None
            assert output.cached_tokens == 0
            logprobs = whole[id].logprobs
            if logprobs is not None:
                assert output.logprobs is not None
                pairs = zip(output.logprobs, logprobs[cut:], strict=True)
                assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in pairs)
    assert_idle(core)


def test_prefix_cache_changes_nothing_but_the_work() -> None:
    shared = prompts(1, seed=9, low=33, high=33)[0]
    asked = [shared + tail for tail in prompts(8, seed=10, high=6)]
    model = ToyModel()
    core = make_core(model)
    run(core, [request("first", shared, max_tokens=1)])
    tokens_before = sum(model.steps)
    got = run(core, requests_of(asked, max_tokens=8))
    assert all(output.cached_tokens == 32 for output in got.values())
    assert core.stats().cached_prompt_tokens == 8 * 32
    assert sum(model.steps) - tokens_before <= sum(len(p) - 32 + 8 for p in asked)
    for i, prompt in enumerate(asked):
        assert got[str(i)].token_ids == model.greedy(prompt, 8)

    cold = make_core(disable_prefix_cache=True)
    again = run(cold, requests_of([shared, shared], max_tokens=8))
    assert [output.cached_tokens for output in again.values()] == [0, 0]
    assert cold.stats().pages_cached == 0


def test_a_whole_cached_prompt_still_computes_its_last_token() -> None:
    model = ToyModel()
    core = make_core(model)
    prompt = prompts(1, low=16, high=16)[0]
    first = run(core, [request("a", prompt, max_tokens=5)])["a"]
    second = run(core, [request("b", prompt, max_tokens=5)])["b"]
    assert (first.cached_tokens, second.cached_tokens) == (0, 12)
    assert first.token_ids == second.token_ids == model.greedy(prompt, 5)


def test_prompt_scores_are_complete_next_to_a_prefix_cache() -> None:
    core = make_core()
    prompt = prompts(1, low=30, high=30)[0]
    run(core, [request("warm", prompt, max_tokens=1)])
    scored = run(core, [request("a", prompt, max_tokens=1, prompt_logprobs=0)])["a"]
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 30
    assert scored.cached_tokens == 0


def test_random_schedules_never_change_an_answer() -> None:
    """Arrivals, aborts, budgets, page pools and caches at random; every survivor equals the plain loop."""
    model = ToyModel(seed=1)
    asked = prompts(24, seed=2, high=30)
    answers = [model.greedy(prompt, 14) for prompt in asked]
    for seed in range(10):
        draw = random.Random(seed)
        core = make_core(
            model,
            num_pages=draw.choice([12, 20, 64]),
            max_context=48,
            page_size=4,
            chunked_prefill_size=draw.choice([1, 3, 8, 32]),
            max_prefill_tokens=draw.choice([1, 8, 40]),
            max_running_requests=draw.choice([1, 3, 8]),
            disable_prefix_cache=draw.random() < 0.3,
        )
        got, aborted = _drive_at_random(core, asked, draw)
        for i, answer in enumerate(answers):
            if i in aborted:
                assert got[str(i)].token_ids == answer[: len(got[str(i)].token_ids)]
            else:
                assert got[str(i)].token_ids == answer, f"schedule {seed}, request {i}"
        assert_idle(core)


def test_near_ties_are_decided_alike_in_any_batch() -> None:
    """Every token has a twin whose logit differs in the last bits only, so that rounding would choose."""
    model = ToyModel(seed=5)
    model.head[25:] = model.head[:25] * (1 + 1e-7 * torch.randn(25, 32))
    asked = prompts(10, seed=7, low=4, high=30)
    seen = []
    for flags in ({"max_running_requests": 1}, {}, {"chunked_prefill_size": 1}, {"chunked_prefill_size": 5}):
        got = run(make_core(model, **flags), requests_of(asked, max_tokens=12, ignore_eos=True))
        seen.append([got[str(i)].token_ids for i in range(len(asked))])
    assert all(answers == seen[0] for answers in seen)


def _drive_at_random(
    core: EngineCore, asked: list[list[int]], draw: random.Random
) -> tuple[dict[str, RequestOutput], set[int]]:
    waiting = list(range(len(asked)))
    draw.shuffle(waiting)
    got: dict[str, RequestOutput] = {}
    aborted: set[int] = set()
    while waiting or core.has_work():
        for _ in range(min(len(waiting), draw.choice([0, 1, 5]))):
            i = waiting.pop()
            core.add(request(str(i), asked[i], max_tokens=14))
        if draw.random() < 0.05:
            i = draw.randrange(len(asked))
            if i not in waiting and (str(i) not in got or got[str(i)].finish_reason is None):
                core.abort([str(i)])
                aborted.add(i)
        for output in core.step():
            merge(got, output)
    return got, aborted


def test_abort_frees_pages_at_once() -> None:
    core = make_core()
    for message in requests_of(prompts(12, low=8), max_tokens=50, ignore_eos=True):
        core.add(message)
    for _ in range(5):
        core.step()
    assert core.stats().pages_used > 0
    core.abort([str(i) for i in range(12)] + ["unknown"])
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
    outputs = core.step()
    assert {o.id for o in outputs} == {str(i) for i in range(12)}
    assert {o.finish_reason for o in outputs} == {"abort"}
    assert_idle(core)
    core.abort(["0"])
    assert not core.has_work()


def test_a_request_with_poison_ends_and_no_other() -> None:
    """NaN in one request's keys and values never reaches another, not even through reused pages."""
    model = ToyModel()
    model.poison = 48
    healthy = [[token % 48 for token in prompt] for prompt in prompts(12, seed=4, low=5, high=30)]
    answers = [model.greedy(prompt, 20) for prompt in healthy]
    assert not any(48 in answer for answer in answers)
    core = make_core(model, num_pages=40, disable_prefix_cache=True)
    messages = requests_of(healthy, max_tokens=20)
    for i in (2, 5, 9):
        messages.insert(i, request(f"bad{i}", [48, *healthy[0]], max_tokens=20))
    got = run(core, messages)
    for i, answer in enumerate(answers):
        assert got[str(i)].token_ids == answer
    for i in (2, 5, 9):
        bad = got[f"bad{i}"]
        assert (bad.finish_reason, bad.token_ids) == ("error", [])
        assert "not finite" in (bad.error or "")
    assert_idle(core)


def test_max_tokens_zero_scores_the_prompt_only() -> None:
    core = make_core(chunked_prefill_size=8)
    prompt = prompts(1, low=30, high=30)[0]
    got = run(core, [request("a", prompt, max_tokens=0, prompt_logprobs=1), request("b", [3], max_tokens=0)])
    assert got["a"].token_ids == got["b"].token_ids == []
    assert got["a"].finish_reason == got["b"].finish_reason == "length"
    assert got["a"].prompt_logprobs is not None
    assert len(got["a"].prompt_logprobs) == 30
    assert_idle(core)


def test_scores_equal_the_reference() -> None:
    model = ToyModel()
    near = 2e-4  # logits reach 137, where the reference's own error in float32 is 1.1e-4
    asked = prompts(6, seed=8, low=2, high=30)
    got = run(
        make_core(model, chunked_prefill_size=7),
        requests_of(asked, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    )
    for i, prompt in enumerate(asked):
        output = got[str(i)]
        tokens = prompt + output.token_ids
        scores = torch.log_softmax(model.reference_logits(tokens).double(), dim=-1)
        assert output.prompt_logprobs is not None
        assert output.logprobs is not None
        assert output.prompt_logprobs[0] is None
        for place, entry in enumerate([*output.prompt_logprobs, *output.logprobs]):
            if entry is None:
                continue
            row = scores[place - 1]
            assert entry.token_id == tokens[place]
            assert entry.logprob == pytest.approx(float(row[tokens[place]]), abs=near)
            assert entry.rank == 1 + int((row > row[tokens[place]]).sum())
            best = row.topk(2 if place < len(prompt) else 3)
            assert [t for t, _ in entry.top] == best.indices.tolist()
            assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=near)


def test_a_minimum_that_no_token_may_reach_is_refused() -> None:
    """If every id ends the output, none may come before min_tokens; without a minimum, one does."""
    core = make_core()
    ids = list(range(ToyModel().shape.vocab_size))
    assert len(run(core, requests_of([[1, 2]], max_tokens=4, stop_token_ids=ids))["0"].token_ids) == 1
    for stops, ignore_eos in ((ids, True), (ids[:-1], False)):  # the last one is the end of sequence
        never = request(
            "never", [1, 2], max_tokens=4, min_tokens=2, stop_token_ids=stops, ignore_eos=ignore_eos
        )
        with pytest.raises(UserError, match="min_tokens=2: stop_token_ids and the end-of-sequence ids cover"):
            core.add(never)
    assert_idle(core)


def test_min_tokens_and_stop_token_ids() -> None:
    model = ToyModel()
    asked = prompts(12, seed=6)
    free = run(make_core(model), requests_of(asked, max_tokens=40))
    early = [i for i, p in enumerate(asked) if 2 <= len(free[str(i)].token_ids) < 20]
    assert early
    held = run(make_core(model), requests_of([asked[i] for i in early], max_tokens=40, min_tokens=20))
    for n, i in enumerate(early):
        tokens = held[str(n)].token_ids
        assert len(tokens) >= 20
        assert 49 not in tokens[:20]
        same = len(free[str(i)].token_ids) - 1
        assert tokens[:same] == free[str(i)].token_ids[:same]
    first = free[str(early[0])].token_ids[1]
    cut = run(make_core(model), [request("a", asked[early[0]], max_tokens=40, stop_token_ids=(first,))])["a"]
    assert (cut.finish_reason, cut.stop_token, cut.token_ids[-1]) == ("stop", first, first)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (request("x", [], max_tokens=1), "prompt is empty"),
        (request("x", [1, 50], max_tokens=1), "token id 50 is not in [0, 50)"),
        (request("x", [-1], max_tokens=1), "token id -1 is not in"),
        (request("x", [1] * 120, max_tokens=9), "the context holds 128"),
        (request("x", [1], max_tokens=1, logit_bias={50: 1.0}), "logit_bias: token id 50"),
        (request("x", [1], max_tokens=1, stop_token_ids=(99,)), "stop_token_ids: token id 99"),
        (request("busy", [1], max_tokens=1), "already in use"),
        (resumed(request("x", [1], max_tokens=4), [3, 50]), "output_ids: token id 50"),
        (resumed(request("x", [1], max_tokens=2), [3, 4]), "nothing is left to generate"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_harms_none(message: AddRequest, says: str) -> None:
    core = make_core()
    core.add(request("busy", [1, 2, 3], max_tokens=4, ignore_eos=True))
    with pytest.raises(UserError) as refused:
        core.add(message)
    assert says in str(refused.value)
    assert len(collect(core)["busy"].token_ids) == 4
    assert_idle(core)


def test_more_than_the_page_pool_is_refused_with_the_flag_that_mends_it() -> None:
    core = make_core(num_pages=4)
    with pytest.raises(UserError, match="--max-total-tokens"):
        core.add(request("a", [1] * 10, max_tokens=8))
    got = run(core, [request("b", [1] * 10, max_tokens=7, ignore_eos=True)])
    assert len(got["b"].token_ids) == 7


def test_requests_without_a_seed_differ_and_a_restart_repeats_them() -> None:
    prompt = [1, 2, 3]
    runs = []
    for _ in range(2):
        got = run(make_core(), requests_of([prompt] * 6, max_tokens=12, temperature=1.0, ignore_eos=True))
        runs.append([got[str(i)].token_ids for i in range(6)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) > 1
    other = run(
        make_core(random_seed=99), requests_of([prompt], max_tokens=12, temperature=1.0, ignore_eos=True)
    )
    assert other["0"].token_ids != runs[0][0]


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    asked = prompts(8, seed=12)
    settings = {"max_tokens": 15, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "ignore_eos": True}
    crowd = run(make_core(), [request(str(i), p, seed=100 + i, **settings) for i, p in enumerate(asked)])
    for i, prompt in enumerate(asked):
        alone = run(make_core(chunked_prefill_size=3), [request("a", prompt, seed=100 + i, **settings)])["a"]
        assert alone.token_ids == crowd[str(i)].token_ids


def test_expert_counts_are_reported_at_most_once_a_second() -> None:
    core = make_core()
    run(core, [request("a", [1, 2, 3], max_tokens=2, ignore_eos=True)])
    assert core.stats().expert_tokens == [[4]]
    assert core.stats().expert_tokens is None


def test_info_is_plain_json() -> None:
    import json

    info = make_core().info()
    assert json.loads(json.dumps(info))["config"]["max_running_requests"] == 8
