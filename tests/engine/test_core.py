"""The engine over a toy model: same tokens as a plain loop, whatever the schedule; nothing leaks."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.toy import ToyModel, collect, make_core, merge, request, run
from turnout.engine.core import EngineCore
from turnout.errors import UserError


def prompts(count: int, seed: int = 0, *, low: int = 1, high: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(49) for _ in range(draw.randint(low, high))] for _ in range(count)]


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_used) == (0, 0, 0)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 64])
def test_greedy_equals_a_plain_loop_for_every_chunk_size(chunk: int) -> None:
    model = ToyModel()
    core = make_core(model, chunked_prefill_size=chunk, max_prefill_tokens=max(chunk, 8))
    asked = prompts(12)
    got = run(core, [request(str(i), p, max_tokens=12) for i, p in enumerate(asked)])
    for i, prompt in enumerate(asked):
        assert got[str(i)].token_ids == model.greedy(prompt, 12)
    assert_idle(core)


def test_stop_reasons() -> None:
    model = ToyModel()
    got = run(make_core(model), [request(str(i), p, max_tokens=60) for i, p in enumerate(prompts(16))])
    for output in got.values():
        ended = output.token_ids[-1] == 49
        assert output.finish_reason == ("stop" if ended else "length")
        assert output.stop_token == (49 if ended else None)
        assert ended or len(output.token_ids) == 60
    assert {o.finish_reason for o in got.values()} == {"stop", "length"}
