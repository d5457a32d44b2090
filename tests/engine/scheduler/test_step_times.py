"""Steps sized by a target, on machines whose times are a formula: what is learned is compared with it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.engine.scheduler.test_scheduler import start
from tests.engine.toy import ToyModel, make_core, request, run
from turnout.engine.scheduler.block_pool import KVBlockPool
from turnout.engine.scheduler.kv_cache import KVCache
from turnout.engine.scheduler.scheduler import Scheduler
from turnout.engine.scheduler.step_times import FIRST_TOKENS, LEAST_TOKENS, StepTimes

Machine = Callable[[int, int], float]  # seconds of a step, by requests that decode and prompt tokens


def linear(decoding: int, prompt: int) -> float:
    return 0.008 + 20e-6 * decoding + 12e-6 * prompt


def bound_by_weights(decoding: int, prompt: int) -> float:
    """Few tokens take as long as 512."""
    return 0.004 + 30e-6 * decoding + (max(0.006, 12e-6 * prompt) if prompt else 0)


@dataclass(frozen=True)
class Ran:
    decoding: int
    prompt: int
    seconds: float


def serve(times: StepTimes | None, machine: Machine, *, clients: int = 48, late: bool = False) -> list[Ran]:
    """Steps of a server whose clients send a prompt of 1,000 tokens for each answer of 60. late: a step is
    read when the next one was launched, and one in five, which draws nothing, with the step after it."""
    draw, now = random.Random(0), 0.0
    scheduler = Scheduler(
        KVCache([KVBlockPool(4096, reuse=False)], 16),
        max_running=clients,
        chunk_tokens=8192,
        prefill_tokens=8192,
        max_context=2048,
        times=times,
    )
    ran: list[Ran] = []
    unread: list[Ran] = []
    for number in range(3 * clients):
        scheduler.add(start(str(number), [0] * draw.randint(500, 1500), draw.randint(30, 90)))
    while scheduler.waiting or scheduler.running:
        chunks = scheduler.schedule()
        decoding = sum(chunk.decodes for chunk in chunks)
        prompt = sum(chunk.length for chunk in chunks) - decoding
        ran.append(Ran(decoding, prompt, machine(decoding, prompt)))
        if times is not None:
            unread.append(ran[-1])
            if not late or (len(unread) > 1 and draw.random() < 0.8):
                for step in unread[: len(unread) - late]:
                    times.launched(step.decoding, step.prompt)
                    now += step.seconds
                times.read(now)
                unread = unread[len(unread) - late :]
        scheduler.computed(chunks)
        for chunk in chunks:
            if chunk.samples:
                chunk.request.tokens.append(0)
                if chunk.request.num_output >= chunk.request.sampling.max_tokens:
                    scheduler.remove(chunk.request)
    return ran


def worst(ran: list[Ran], share: float = 0.99) -> float:
    """Milliseconds that this share of steps with decoding stay under."""
    seconds = sorted(step.seconds for step in ran if step.decoding)
    return 1000 * seconds[int(share * len(seconds))]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("machine", [linear, bound_by_weights])
def test_steps_stay_under_the_target_and_prompts_use_what_it_leaves(machine: Machine, late: bool):
    plain, ran = serve(None, machine), serve(StepTimes(0.020), machine, late=late)
    assert worst(plain) > 60
    assert worst(ran) < 22
    tokens = [sum(step.decoding + step.prompt for step in steps) for steps in (ran, plain)]
    assert tokens[0] == tokens[1]
    full = [step for step in ran[30:] if step.decoding and step.prompt]
    assert sum(step.seconds for step in full) / len(full) > 0.014  # room is used, not given away


def test_a_target_that_no_step_meets_is_told_and_prompts_get_on(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        ran = serve(StepTimes(0.005), linear, clients=8)
    told = [record.getMessage() for record in caplog.records]
    assert any(
        "--target-tpot 5: no step meets it" in line and "lower --max-running-requests" in line
        for line in told
    )
    assert len(told) < 4
    mixed = [step for step in ran if step.decoding and step.prompt]
    assert all(step.prompt <= 8 * FIRST_TOKENS for step in mixed)
    assert sum(step.prompt <= LEAST_TOKENS for step in mixed) > len(mixed) / 2


def test_a_machine_that_slows_down_gets_shorter_prompts():
    times = StepTimes(0.020)
    serve(times, linear)
    before = times.prompt_tokens(20, 8192)
    assert before == pytest.approx((0.018 - linear(20, 0)) / 12e-6, rel=0.1)
    for step in range(200):
        prompt = 300 * (step % 2)
        times.rest(0.0)
        times.launched(20, prompt)
        times.read(1.5 * linear(20, prompt))
    after = times.prompt_tokens(20, 8192)
    assert after == pytest.approx((0.018 - 1.5 * linear(20, 0)) / (1.5 * 12e-6), rel=0.1)


def test_what_was_measured_beforehand_sizes_the_first_prompts():
    times = StepTimes(0.020)
    for decoding in (1, 2, 4, 8, 16, 32):
        times.measured(decoding, 0, linear(decoding, 0))
    for prompt in (16, 32, 64, 128, 256, 512, 1024):
        times.measured(0, prompt, linear(0, prompt))
    assert times.prompt_tokens(20, 8192) == pytest.approx((0.018 - linear(20, 0)) / 12e-6, rel=0.1)
    assert worst(serve(times, linear), share=0.999) < 22


def test_a_target_that_no_step_meets_is_told_before_any_request(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        core = make_core(target_tpot=0.001, chunked_prefill_size=64)
    assert "--target-tpot 0.001: no step meets it: decoding 1 requests" in caplog.text
    assert core.stats().computed_tokens == core.stats().pages_used == 0
    measured = make_core(target_tpot=1e6, chunked_prefill_size=64).info()["measured_step_ms"]
    assert [*measured["decode"]] == [1, 2, 4, 8]
    assert [*measured["prefill"]] == [16, 32, 64]
    assert all(time > 0 for times in measured.values() for time in times.values())
    assert "measured_step_ms" not in make_core().info()


def test_prompts_alone_have_no_target():
    assert StepTimes(0.001).prompt_tokens(0, 8192) == 8192


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_target_changes_no_token(overlap: str):
    """By the real clock, with a target that no step of this model can meet."""
    model, draw = ToyModel(), random.Random(3)
    asked = {str(i): [draw.randrange(49) for _ in range(draw.randint(1, 60))] for i in range(8)}
    core = make_core(model, target_tpot=0.001, overlap_schedule=overlap, num_pages=256)
    found = run(core, [request(id, ids, max_tokens=12, ignore_eos=True) for id, ids in asked.items()])
    assert {id: output.token_ids for id, output in found.items()} == {
        id: model.greedy(ids, 12, eos=False) for id, ids in asked.items()
    }
