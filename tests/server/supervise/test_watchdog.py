"""What the watchdog makes of the board, at times that the test makes up."""

from __future__ import annotations

from turnout.parallel.health import Reading
from turnout.server.supervise.watchdog import Stall, Watchdog

Line = tuple[int, int, str, int] | tuple[int, int, str, int, int]


def look(dog: Watchdog, now: float, *lines: Line, busy: bool = True) -> Stall | None:
    """Each line: heartbeats, step, phase, collectives, and perhaps parts."""
    names = ("beats", "step", "phase", "collectives", "parts")
    readings = {rank: Reading(**dict(zip(names, line, strict=False))) for rank, line in enumerate(lines)}
    return dog.look(now, readings, busy=busy)


def first_stall(dog: Watchdog, *lines: Line, start: int = 0, beating: bool = True) -> tuple[int, Stall]:
    """The first stall of a group that stands still, its hearts beating or not, and the seconds until then."""
    for second in range(start, start + 1000):
        beats = second + 1 if beating else 1
        stall = look(dog, second, *((beats, *line[1:]) for line in lines))
        if stall:
            return second - start, stall
    raise AssertionError("no stall in 1000 s")


def test_a_stopped_process_is_named_though_another_is_as_far():
    dog = Watchdog(10)
    for second in range(10):
        assert look(dog, second, (second + 1, 5, "decode", 9), (3, 5, "decode", 9)) is None
    stall = look(dog, 10, (11, 5, "decode", 9), (3, 5, "decode", 9))
    assert stall is not None
    assert (stall.rank, stall.runs) == (1, False)
    assert "rank 1 does not run: no heartbeat for 10 s" in str(stall)
    assert (stall.reading.step, stall.reading.phase) == (5, "decode")


def test_a_stopped_process_is_found_though_others_get_on():
    dog = Watchdog()
    for second in range(3):
        assert look(dog, second, (second + 1, second, "decode", 9), (3, 5, "decode", 9)) is None
    stall = look(dog, 3, (11, 10, "decode", 9), (3, 5, "decode", 9))
    assert stall is not None
    assert (stall.rank, stall.seconds) == (1, 3)


def test_of_running_processes_the_one_behind_is_named():
    dog = Watchdog(10)
    second, stall = first_stall(dog, (0, 5, "agreeing", 12), (0, 4, "prefill", 9), (0, 4, "prefill", 10))
    assert (second, stall.rank, stall.runs, stall.reading.phase) == (10, 1, True, "prefill")
    assert "rank 1 is waited for: no progress for 10 s" in str(stall)


def test_silence_is_told_from_waiting():
    """By default 3 s are enough where a process does not run, and 30 where all of them do."""
    line = (0, 4, "decode", 9)
    assert first_stall(Watchdog(), line, line, beating=False)[0] == 3
    assert first_stall(Watchdog(), line, line)[0] == 30


def test_any_progress_is_progress():
    """A layer, a collective or a phase now and then: a step may take as long as it will."""
    for field in range(1, 5):
        dog = Watchdog(10)
        for second in range(100):
            line = [second + 1, 5, "prefill", 0, 0]
            line[field] = ("prefill", "decode")[second // 8 % 2] if field == 2 else second // 8
            assert look(dog, second, tuple(line), (second + 1, 5, "prefill", 0, 0)) is None


def test_a_group_gets_as_long_as_its_pauses_show_it_needs():
    """Of compiling a kernel and of steps; not of loading, which is a matter of disks."""
    dog = Watchdog()
    for second in range(60):
        look(dog, second, (second + 1, 0, "loading", 0, 1))
    look(dog, 60, (61, 0, "compiling", 0, 2))
    assert dog.longest == 0
    for second in range(61, 80):
        look(dog, second, (second + 1, 0, "compiling", 0, 2))
    look(dog, 80, (81, 0, "resting", 0, 3), busy=False)
    assert dog.longest == 20
    assert first_stall(dog, (0, 1, "prefill", 0, 4), start=81)[0] == 100


def test_a_rank_that_starts_has_a_minute_of_silence_and_any_time_to_get_on():
    for phase in ("loading", "compiling"):
        assert first_stall(Watchdog(), (0, 0, phase, 0), beating=False)[0] == 60
        dog = Watchdog()
        assert all(look(dog, second, (second + 1, 0, phase, 0)) is None for second in range(500))


def test_a_process_that_has_not_begun_is_not_silent():
    dog = Watchdog()
    assert all(look(dog, second, (0, 0, "loading", 0)) is None for second in range(500))


def test_a_group_without_work_may_rest():
    dog = Watchdog(10)
    for second in range(100):
        assert look(dog, second, (second + 1, 5, "resting", 9), busy=False) is None
    assert first_stall(dog, (0, 5, "resting", 9), start=100)[0] == 9


def test_time_that_the_watchdog_did_not_run_does_not_count():
    """A container that was paused: the ranks stood still as well."""
    dog = Watchdog(10)
    look(dog, 0, (1, 5, "decode", 9))
    assert look(dog, 3600, (1, 5, "decode", 9)) is None
    assert first_stall(dog, (0, 5, "decode", 9), start=3601, beating=False)[0] == 8


def test_silence_is_counted_from_the_last_heartbeat():
    dog = Watchdog(10)
    for second in range(6):
        look(dog, second, (second + 1, 1, "resting", 0), (1, 1, "resting", 0), busy=False)
    assert (dog.silence(0), dog.silence(1), dog.silence(7)) == (0, 5, 0)


def test_nothing_is_known_before_the_first_reading():
    assert Watchdog(1).look(100, {}, busy=True) is None
