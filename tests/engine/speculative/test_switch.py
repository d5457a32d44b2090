"""Which steps bring drafts: on machines whose times are a formula, and in engines on such machines."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.speculative.test_ngram import NGRAM
from tests.engine.step.test_cuda_graphs import Together
from tests.engine.toy import ToyModel, make_core, request, run
from turnout.engine.ranks.step_sync import StepSync
from turnout.engine.speculative.switch import PERIOD, DraftSwitch
from turnout.models.interface import Step
from turnout.parallel.topology import Topology

VERIFIED = 4  # tokens of a request that drafts


def seconds(rows: int) -> float:
    """Of a step: weights take 5 ms to read, and from 64 rows on arithmetic takes longer."""
    return max(0.005, rows * 80e-6)


def shares(switch: DraftSwitch, decoding: int, accepted: Callable[[], float], steps: int = 2000) -> float:
    """The share of the last half of `steps` that bring drafts, each accepted with the probability given."""
    draw, drafted = random.Random(decoding), 0
    for step in range(steps):
        drafts = switch.drafts(decoding)
        drafted += drafts and step >= steps // 2
        given = decoding
        if drafts:
            for _ in range(decoding):
                while given < VERIFIED * decoding and draw.random() < accepted():
                    given += 1
        rows = decoding * (VERIFIED if drafts else 1)
        switch.ran(decoding, drafts, given, seconds(rows) * draw.uniform(0.9, 1.1))
    return drafted / (steps - steps // 2)


def test_drafts_rest_where_verifying_costs_more_than_it_gives():
    """At 0.4, about 1.67 tokens a step: worth any time up to that of 1.67 steps without."""
    switch = DraftSwitch()
    for decoding in (1, 2, 4, 8, 16):
        assert shares(switch, decoding, lambda: 0.4) > 0.95, decoding
    for decoding in (64, 128, 256):
        assert shares(switch, decoding, lambda: 0.4) < 0.05, decoding


def test_a_change_of_text_is_noticed():
    switch = DraftSwitch()
    assert shares(switch, 31, lambda: 0.1) < 0.05
    assert shares(switch, 31, lambda: 0.9, steps=4 * PERIOD) > 0.9
    assert shares(switch, 31, lambda: 0.1, steps=4 * PERIOD) < 0.1


Times = Callable[[int], float]  # milliseconds of a step, by its tokens


class Timed(ToyModel):
    """Steps take so long, and nothing else takes any time. now: seconds since the start."""

    def __init__(self, milliseconds: Times, *, drafts: bool = False):
        super().__init__(drafts=drafts)
        self._milliseconds, self.now = milliseconds, 0.0

    def forward(self, step: Step):
        self.now += self._milliseconds(len(step.input_ids)) / 1000
        return super().forward(step)

    def clock(self) -> float:
        return self.now


def slow(tokens: int) -> float:
    return tokens


def even(tokens: int) -> float:
    """For any number of tokens."""
    return 4


@pytest.mark.parametrize("seed", [0, 1])
def test_an_engine_lets_drafts_rest_and_its_answers_stay(seed: int):
    """Tokens drawn at random: few drafts hold, and each costs as much as a token."""
    draw = random.Random(seed)
    asked = {str(i): [draw.randrange(40) for _ in range(12)] for i in range(4)}
    sampling = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": seed}
    messages = [request(id, ids, **sampling) for id, ids in asked.items()]
    always = make_core(ToyModel(), num_pages=256, **NGRAM)
    model = Timed(slow)
    core = make_core(model, num_pages=256, drafts_rest=True, clock=model.clock, **NGRAM)
    assert run(core, messages) == run(always, messages)
    given, drafted = always.stats().spec_accepted_tokens, always.stats().spec_draft_tokens
    assert given < 0.5 * drafted  # so that drafting loses
    assert 0 < core.stats().spec_draft_tokens < 0.7 * drafted


@pytest.mark.parametrize(
    ("times", "rest"), [((slow, even), True), ((even, slow), False)], ids=["slow", "even"]
)
def test_ranks_that_share_requests_let_drafts_rest_together(times: tuple[Times, Times], rest: bool):
    """By the times of the one that leads, whether or not on the other they would pay."""
    together, draw = Together(2), random.Random(2)
    asked = {str(i): [draw.randrange(40) for _ in range(12)] for i in range(3)}
    sampling = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 2}
    messages = [request(id, ids, **sampling) for id, ids in asked.items()]
    models = [Timed(milliseconds) for milliseconds in times]

    def answers(rank: int) -> dict[str, list[int]]:
        step_sync = StepSync(Topology(tp_size=2, rank=rank), together.of(rank))
        model = models[rank]
        shared = {"num_pages": 256, "drafts_rest": True, "clock": model.clock, "step_sync": step_sync}
        core = make_core(model, **shared, **NGRAM)
        return {id: output.token_ids for id, output in run(core, messages).items()}

    with ThreadPoolExecutor(2) as pool:
        leader, other = pool.map(answers, range(2))
    always = make_core(model := ToyModel(), num_pages=256, **NGRAM)
    wanted = {id: output.token_ids for id, output in run(always, messages).items()}
    assert leader == other == wanted
    assert models[0].steps == models[1].steps  # tokens of each: drafts are among them on both or neither
    assert (sum(models[0].steps) < 0.8 * sum(model.steps)) == rest


def test_a_draft_layer_guesses_nothing_while_drafts_rest():
    """Its tokens are computed all the same, so that it may guess again."""
    model, draw = Timed(slow, drafts=True), random.Random(1)
    flags = {"speculative_algorithm": "MTP", "speculative_num_steps": 3, "num_pages": 256}
    core = make_core(model, drafts_rest=True, clock=model.clock, **flags)
    passes, draft = [], model.draft

    def noted(step: Step, hidden):
        passes.append(len(step.input_ids))
        return draft(step, hidden)

    model.draft = noted
    asked = {str(i): [draw.randrange(40) for _ in range(12)] for i in range(4)}
    found = run(core, [request(id, ids, max_tokens=100, ignore_eos=True) for id, ids in asked.items()])
    assert {id: found[id].token_ids for id in asked} == {
        id: model.greedy(ids, 100, eos=False) for id, ids in asked.items()
    }
    assert sum(model.steps) <= sum(passes) < sum(model.steps) + 2 * 0.7 * 4 * 100
