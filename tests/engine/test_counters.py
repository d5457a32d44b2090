"""What a rank counts of its steps and queue, against what its steps were seen to do."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.toy import ToyModel, make_core, request, run
from turnout.engine.messages import EngineStats
from turnout.engine.scheduler.scheduler import Lack
from turnout.engine.startup import StartupTimes


def test_step_sizes_are_a_histogram_of_the_forwards() -> None:
    model = ToyModel()
    core = make_core(model, chunked_prefill_size=16, max_prefill_tokens=24)
    run(core, [request(str(i), [1, 2, 3] * (i + 1), max_tokens=5, ignore_eos=True) for i in range(7)])
    stats = core.stats()
    expected = Counter(next(b for b in range(20) if size <= 2 ** (b - 1)) for size in model.steps)
    assert {b: count for b, count in enumerate(stats.step_sizes) if count} == expected
    assert stats.computed_tokens == sum(model.steps)
    assert stats.steps == len(model.steps)
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0


@pytest.mark.parametrize(
    ("settings", "asked", "lack"),
    [
        ({"max_running_requests": 2}, 4, Lack.SLOTS),
        ({"max_prefill_tokens": 8, "chunked_prefill_size": 8}, 4, Lack.PREFILL),
        ({"num_pages": 10}, 4, Lack.PAGES),
        ({}, 4, Lack.NOTHING),
    ],
)
def test_what_the_queue_waits_for(settings: dict, asked: int, lack: Lack) -> None:
    core = make_core(**settings)
    for i in range(asked):
        core.add(request(str(i), [1 + i] * 8, max_tokens=30, ignore_eos=True))
    core.step()
    stats: EngineStats = core.stats()
    assert stats.waiting_for == lack
    assert bool(stats.num_waiting) == bool(lack)


def test_the_first_output_says_how_long_it_waited_and_the_last_how_often_it_was_put_back() -> None:
    core = make_core(num_pages=24, disable_prefix_cache=True)
    for i in range(4):
        core.add(request(str(i), [1 + i] * 8, max_tokens=40, ignore_eos=True))
    outputs = [output for _ in range(400) if core.has_work() for output in core.step()]
    for i in range(4):
        waited = [output.waited for output in outputs if output.id == str(i)]
        assert waited[0] is not None
        assert min(waited[0]) >= 0
        assert not any(waited[1:])
    preempted = {output.id: len(output.preempted) for output in outputs if output.finish_reason}
    assert sum(preempted.values()) == core.stats().preemptions > 0


def test_a_resumed_request_says_again_how_long_it_waited() -> None:
    import msgspec

    core = make_core()
    resumed = msgspec.structs.replace(
        request("a", [1, 2, 3], max_tokens=6, ignore_eos=True), output_ids=[4, 5]
    )
    core.add(resumed)
    outputs = [output for _ in range(10) if core.has_work() for output in core.step()]
    assert [output.waited is not None for output in outputs] == [True, False, False, False]


def test_phases_of_a_start_add_up() -> None:
    times = StartupTimes()
    for phase in ("plan", "weights", "kernels", "weights"):
        times.begin(phase)
    times.end()
    assert list(times.seconds) == ["imports", "plan", "weights", "kernels"]
    assert times.seconds["imports"] > 0  # this process runs for a while
    assert str(times).startswith(f"started in {sum(times.seconds.values()):.1f} s: imports ")
    with pytest.raises(AssertionError):
        times.begin("lunch")
