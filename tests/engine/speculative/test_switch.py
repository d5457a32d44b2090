"""Which steps bring drafts: on machines whose times are a formula, and in an engine that takes its time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.engine.speculative.test_ngram import NGRAM
from tests.engine.toy import ToyModel, make_core, request, run
from turnout.engine.speculative.switch import PERIOD, DraftSwitch
from turnout.models.interface import Step

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
        switch.ran(decoding, given, seconds(rows) * draw.uniform(0.9, 1.1))
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


class Slow(ToyModel):
    """Takes a millisecond for each token."""

    def forward(self, step: Step):
        time.sleep(0.001 * len(step.input_ids))
        return super().forward(step)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_engine_lets_drafts_rest_and_its_answers_stay(seed: int):
    """Tokens drawn at random: few drafts hold, and each costs as much as a token."""
    draw = random.Random(seed)
    asked = {str(i): [draw.randrange(40) for _ in range(12)] for i in range(4)}
    sampling = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": seed}
    messages = [request(id, ids, **sampling) for id, ids in asked.items()]
    always = make_core(ToyModel(), num_pages=256, **NGRAM)
    core = make_core(Slow(), num_pages=256, drafts_rest=True, **NGRAM)
    assert run(core, messages) == run(always, messages)
    given, drafted = always.stats().spec_accepted_tokens, always.stats().spec_draft_tokens
    assert given < 0.5 * drafted  # so that drafting loses
    assert 0 < core.stats().spec_draft_tokens < 0.7 * drafted
