"""Speculative decoding: drafts are what a search finds, and change nothing but the number of steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.cluster import Cluster, SingleRank
from tests.engine.toy import SHAPE, ToyModel, always_drafting, collect, make_core, merge, request, run
from tests.ranks import Pools
from tests.tiny import write_model
from turnout import LLM, SamplingParams
from turnout.engine.core import EngineCore
from turnout.engine.messages import AddRequest, RequestOutput
from turnout.engine.speculative.ngram import LONGEST, SHORTEST, NgramIndex
from turnout.evals import wordmath
from turnout.models.interface import Step

NGRAM = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}


class Chatterbox(ToyModel):
    """A toy that hardly minds where a token stands, so that it repeats itself; remembers its forwards."""

    def __init__(self, seed: int = 0, *, vocabulary: int = SHAPE.vocab_size):
        super().__init__(seed)
        self.position *= 0.02
        self.head[vocabulary:-1] = 0  # a smaller one is repeated sooner
        self.seen: list[tuple[str, int]] = []

    def forward(self, step: Step) -> torch.Tensor:
        self.seen.append((step.phase, len(step.input_ids)))
        return super().forward(step)


def prompts(count: int, seed: int, *, low: int = 1, high: int = 30, kinds: int = 12) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(kinds) for _ in range(draw.randint(low, high))] for _ in range(count)]


def searched(tokens: Sequence[int], count: int) -> list[int]:
    """What followed the longest n-gram at the end where it occurred last, token by token."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == list(tokens[-n:]):
                longer = list(tokens)
                for i in range(count):
                    longer.append(longer[end + i])
                return longer[len(tokens) :]
    return []


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=12),
    count=st.integers(1, 7),
)
def test_drafts_are_those_of_a_search(pieces: list[list[int]], count: int) -> None:
    index, tokens = NgramIndex(), []
    for piece in pieces:
        tokens += piece
        assert index.draft(tokens, count) == searched(tokens, count)


def test_drafts_prefer_longer_matches_then_newer_ones() -> None:
    assert NgramIndex().draft([1, 2, 3, 7, 5, 2, 3, 8, 1, 2, 3], 2) == [7, 5]
    assert NgramIndex().draft([3, 4, 3, 5, 3], 1) == [5]
    assert NgramIndex().draft([1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]
    assert NgramIndex().draft([1, 2, 3], 4) == []


def any_sampling(draw: random.Random) -> dict[str, object]:
    """Parameters of all kinds."""
    choices: list[dict[str, object]] = [
        {},
        {"ignore_eos": True},
        {"temperature": 0.8, "seed": draw.randrange(2**40)},
        {"temperature": 0.5, "top_k": 8, "top_p": 0.9, "seed": draw.randrange(2**40)},
        {"stop_token_ids": (draw.randrange(12), draw.randrange(12))},
        {"min_tokens": 9, "stop_token_ids": (draw.randrange(12),)},
        {"logit_bias": {draw.randrange(12): 3.0, draw.randrange(12): -100.0}},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"repetition_penalty": 1.2, "temperature": 0.6, "seed": draw.randrange(2**40)},
    ]
    return {"max_tokens": draw.choice([0, 1, 2, 5, 20]), **draw.choice(choices)} | (
        {"min_tokens": 0} if draw.random() < 0.5 else {"max_tokens": 20}
    )


def drive(core: EngineCore, messages: list[AddRequest], draw: random.Random) -> dict[str, RequestOutput]:
    """Random arrivals and aborts."""
    waiting = list(messages)
    got: dict[str, RequestOutput] = {}
    while waiting or core.has_work():
        for _ in range(min(len(waiting), draw.choice([0, 1, 5]))):
            core.add(waiting.pop())
        if draw.random() < 0.05:
            core.abort([draw.choice(messages).id])
        for output in core.step():
            merge(got, output)
    return got


def same_logprobs(a: RequestOutput, b: RequestOutput) -> None:
    for one, other in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
        assert (one is None) == (other is None)
        for x, y in zip(one or [], other or [], strict=True):
            if x is not None and y is not None:
                assert x.token_id == y.token_id
                assert x.logprob == pytest.approx(y.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.more) for n in range(12, 25))]
)
def test_random_schedules_never_change_an_answer(seed: int) -> None:
    """Sampling, stops, page pools and caches at random: every survivor equals the engine without drafts."""
    draw = random.Random(seed)
    model = Chatterbox(seed % 4)
    asked = prompts(24, seed)
    messages = [request(str(i), prompt, **any_sampling(draw)) for i, prompt in enumerate(asked)]
    plain = run(make_core(model), messages)
    page_size = draw.choice([2, 4, 5])
    core = make_core(
        model,
        num_pages=-(-52 // page_size) + draw.choice([0, 5, 40]),
        max_context=52,
        page_size=page_size,
        chunked_prefill_size=draw.choice([1, 3, 8, 32]),
        max_prefill_tokens=draw.choice([1, 8, 40]),
        max_running_requests=draw.choice([1, 3, 8]),
        disable_prefix_cache=draw.random() < 0.3,
        speculative_algorithm="ngram",
        speculative_num_draft_tokens=draw.choice([2, 3, 4, 7]),
    )
    got = drive(core, messages, draw)
    for id, expected in plain.items():
        if got[id].finish_reason == "abort":
            assert got[id].token_ids == expected.token_ids[: len(got[id].token_ids)]
            continue
        assert got[id].token_ids == expected.token_ids, id
        assert (got[id].finish_reason, got[id].stop_token) == (expected.finish_reason, expected.stop_token)
        same_logprobs(got[id], expected)
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)
    assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens


def test_tokens_that_repeat_come_several_to_a_step() -> None:
    prompt = [5, 6, 7, 8] * 6
    model = Chatterbox(3, vocabulary=3)
    wanted = [request("a", prompt, max_tokens=64, ignore_eos=True)]
    plain, core = make_core(model), make_core(model, **NGRAM)
    assert run(core, wanted)["a"].token_ids == run(plain, wanted)["a"].token_ids
    stats = core.stats()
    assert plain.stats().steps == 2 + 64 - 1  # a prompt of two chunks, then token by token
    assert stats.steps < 2 + 64 / 2
    assert stats.generation_tokens == 64
    # Every step gives one token more than it accepts drafts, and the first came from the prompt.
    assert stats.spec_accepted_tokens == 64 - 1 - (stats.steps - 2)


def test_every_step_may_give_each_request_several_tokens() -> None:
    core = make_core(Chatterbox(3, vocabulary=3), **NGRAM)
    for i in range(3):
        core.add(request(str(i), [5, 6, 7] * 3, max_tokens=40, ignore_eos=True, logprobs=0))
    most = 0
    while core.has_work():
        for output in core.step():
            assert output.logprobs is not None
            assert [entry.token_id for entry in output.logprobs] == output.token_ids
            most = max(most, len(output.token_ids))
    assert most == 4


@pytest.fixture
def repeating() -> tuple[ToyModel, list[int]]:
    """A model and a prompt that it continues as that ends: 11, 6, 7, again and again."""
    model = Chatterbox(8, vocabulary=12)
    prompt = [5, 6, 7] * 3 + [11, 6, 7] * 3
    assert model.greedy(prompt, 6) == [11, 6, 7] * 2
    return model, prompt


def test_a_stop_among_accepted_drafts_ends_the_request_there(repeating: tuple[ToyModel, list[int]]) -> None:
    model, prompt = repeating
    for stop, count in ((11, 1), (6, 2), (7, 3)):
        core = make_core(model, **NGRAM)
        got = run(core, [request("a", prompt, max_tokens=40, stop_token_ids=(stop,))])["a"]
        assert got.token_ids == [11, 6, 7][:count]
        assert (got.finish_reason, got.stop_token) == ("stop", stop)
        assert core.stats().generation_tokens == count


def test_nothing_is_drafted_beyond_the_last_token(repeating: tuple[ToyModel, list[int]]) -> None:
    model, prompt = repeating
    for max_tokens, drafts in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (6, 3)):
        core = make_core(model, **NGRAM)
        run(core, [request("a", prompt, max_tokens=max_tokens)])
        assert core.stats().spec_draft_tokens == drafts


def test_penalties_are_not_drafted_for() -> None:
    core = make_core(Chatterbox(3, vocabulary=3), **NGRAM)
    run(core, [request("a", [5, 6] * 8, max_tokens=30, frequency_penalty=0.1, ignore_eos=True)])
    assert core.stats().spec_draft_tokens == 0


def test_near_ties_among_drafts_are_decided_as_without() -> None:
    """Some tokens have a twin whose logit differs in the last bits only, so that rounding would choose."""
    model = Chatterbox(5)
    twins = 1 + 1e-7 * torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    model.head[25:31] = model.head[:6] * twins
    messages = [
        request(str(i), prompt, max_tokens=24, ignore_eos=True)
        for i, prompt in enumerate(prompts(10, 7, low=8, high=20))
    ]
    plain = run(make_core(model, max_running_requests=1), messages)
    for flags in ({}, {"max_running_requests": 2}, {"speculative_num_draft_tokens": 7}):
        core = make_core(model, **(NGRAM | flags))
        got = run(core, messages)
        assert [got[id].token_ids for id in plain] == [plain[id].token_ids for id in plain]
        assert core.stats().spec_accepted_tokens > 20


def test_only_accepted_tokens_are_reused_by_other_requests() -> None:
    """What one request leaves in the prefix cache serves the next as well as what a plain one leaves."""
    model = Chatterbox(2)
    first = [request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(prompts(12, 4, kinds=4))]
    plain, core = make_core(model, num_pages=200), make_core(model, num_pages=200, **NGRAM)
    answers = run(plain, first)
    run(core, first)
    assert core.stats().spec_accepted_tokens < core.stats().spec_draft_tokens
    again = [request(f"again {m.id}", m.prompt_ids + answers[m.id].token_ids, max_tokens=20) for m in first]
    expected, got = run(plain, again), run(core, again)
    for id, output in expected.items():
        assert (got[id].token_ids, got[id].cached_tokens) == (output.token_ids, output.cached_tokens)
    assert sum(output.cached_tokens for output in got.values()) > 100


def test_drafts_displace_nobody() -> None:
    """As many pages as plain decoding needs: no request is preempted, and none waits longer."""
    model = Chatterbox(3, vocabulary=3)
    messages = [request(str(i), [5, 6, 7, i], max_tokens=29, ignore_eos=True) for i in range(4)]
    plain = make_core(model, num_pages=32, max_context=33, disable_prefix_cache=True)
    core = make_core(model, num_pages=32, max_context=33, disable_prefix_cache=True, **NGRAM)
    assert run(core, messages) == run(plain, messages)
    assert core.stats().preemptions == plain.stats().preemptions == 0


def test_no_step_brings_more_than_the_budget_and_the_largest_follows_the_smallest() -> None:
    model = Chatterbox(3, vocabulary=3)
    core = make_core(
        model, max_prefill_tokens=8, chunked_prefill_size=8, max_running_requests=8, num_pages=128, **NGRAM
    )
    budget = core.engine_plan.budget
    assert (budget.tokens_per_request, budget.decode, budget.local) == (4, 32, 32)
    for i in range(8):
        core.add(request(str(i), [5, 6, 7] * 2, max_tokens=40, ignore_eos=True))
    collect(core)
    run(core, [request("one", [5], max_tokens=3, ignore_eos=True)])
    decode = [tokens for phase, tokens in model.seen if phase == "decode"]
    assert max(decode) == budget.decode
    assert max(tokens for phase, tokens in model.seen if phase == "prefill") <= budget.local


def test_the_plan_counts_what_drafts_bring(tmp_path: Path) -> None:
    write_model(tmp_path)
    flags = {"max_prefill_tokens": 64, "chunked_prefill_size": 64, "max_running_requests": 32}
    small = SamplingParams(max_tokens=1, ignore_eos=True)
    large = SamplingParams(max_tokens=24, ignore_eos=True)
    asked = [[i, i + 1, i + 2] * 2 for i in range(32)]
    infos, answers = [], []
    for drafts in ({}, NGRAM):
        with LLM(str(tmp_path), num_threads=1, load_progress=False, **flags, **drafts) as llm:
            infos.append(llm.info())
            llm.generate([[1]], small)
            answers.append([c.token_ids for c in llm.generate(asked, large, progress=False)])
    few, many = infos
    assert (few["budget"]["decode"], many["budget"]["decode"]) == (32, 128)
    assert (few["budget"]["local"], many["budget"]["local"]) == (64, 128)
    assert many["plan"]["decode"]["max_tokens"] == 128
    assert many["memory"]["logits"] == 4 * few["memory"]["logits"]
    assert many["memory"]["workspace"] > few["memory"]["workspace"]
    assert answers[0] == answers[1]


def test_the_demo_answers_the_same_in_fewer_steps() -> None:
    questions = [problem.question for problem in wordmath.heldout(20, seed=11)]
    asked = [[{"role": "user", "content": question}] for question in questions]
    texts, steps = [], []
    for flags in ({}, NGRAM):
        with LLM("demo", num_threads=1, load_progress=False, **flags) as llm:
            core = always_drafting(llm._open())
            texts.append([c.text for c in llm.chat(asked, SamplingParams(max_tokens=200), progress=False)])
            steps.append(core.stats().steps)
    assert texts[0] == texts[1]
    assert steps[1] < 0.85 * steps[0]


def test_ranks_draft_alike_and_answer_as_one_without_drafts(ranks: Pools, tmp_path: Path) -> None:
    """Two groups of two ranks that share their requests, with experts on all four."""
    model = tmp_path / "model"
    write_model(model)
    asked = prompts(10, 3, low=6, high=30, kinds=3)
    single = SingleRank(model, 24)
    with Cluster(ranks(4), tmp_path, model, dp_size=2, ep_size=4, **NGRAM) as cluster:
        for i, prompt in enumerate(asked):
            cluster.add(str(i), prompt, dp_rank=i % 3 // 2, max_tokens=24)
        cluster.wait(map(str, range(len(asked))), 60)
    for i, prompt in enumerate(asked):
        assert cluster.outputs[str(i)].token_ids == single.answer(prompt, 24), i
    stats = cluster.stats.values()
    assert sum(of_rank.spec_draft_tokens for of_rank in stats) > 100
    assert sum(of_rank.spec_accepted_tokens for of_rank in stats) > 0
