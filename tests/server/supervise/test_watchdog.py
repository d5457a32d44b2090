"""What the watchdog makes of the board, at times that the test makes up."""

from __future__ import annotations

from turnout.parallel.health import Reading
from turnout.server.supervise.watchdog import Stall, Watchdog


def look(dog: Watchdog, now: float, *lines: tuple[int, int, str, int], busy: bool = True) -> Stall | None:
    """Each line: heartbeats, step, phase, collectives."""
    readings = {
        rank: Reading(beats=beats, step=step, phase=phase, collectives=collectives)
        for rank, (beats, step, phase, collectives) in enumerate(lines)
    }
    return dog.look(now, readings, busy=busy)


def test_a_stopped_process_is_named_though_another_is_as_far():
    dog = Watchdog(10)
    for second in range(10):
        assert look(dog, second, (second, 5, "decode", 9), (3, 5, "decode", 9)) is None
    stall = look(dog, 10, (10, 5, "decode", 9), (3, 5, "decode", 9))
    assert stall is not None
    assert (stall.rank, stall.runs) == (1, False)
    assert "rank 1 does not run" in str(stall)
    assert "step 5, phase decode" in str(stall)


def test_of_running_processes_the_one_behind_is_named():
    dog = Watchdog(10)
    for second in range(11):
        lines = (second, 5, "agreeing", 12), (second, 4, "prefill", 9), (second, 4, "prefill", 10)
        stall = look(dog, second, *lines)
    assert stall is not None
    assert (stall.rank, stall.runs, stall.reading.phase) == (1, True, "prefill")


def test_any_progress_is_progress():
    dog = Watchdog(10)
    for second in range(100):
        assert look(dog, second, (second, 5, "prefill", second // 8), (second, 5, "prefill", 0)) is None


def test_a_group_without_work_may_rest():
    dog = Watchdog(10)
    for second in range(100):
        assert look(dog, second, (second, 5, "resting", 9), busy=False) is None
    assert look(dog, 108, (108, 5, "resting", 9)) is None
    assert look(dog, 109, (109, 5, "resting", 9)) is not None


def test_silence_is_counted_from_the_last_heartbeat():
    dog = Watchdog(10)
    for second in range(6):
        look(dog, second, (second, 1, "resting", 0), (0, 1, "resting", 0), busy=False)
    assert (dog.silence(0, 6), dog.silence(1, 6), dog.silence(7, 6)) == (1, 6, 0)


def test_nothing_is_known_before_the_first_reading():
    assert Watchdog(1).look(100, {}, busy=True) is None
