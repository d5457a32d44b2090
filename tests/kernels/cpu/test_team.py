"""Helpers of a call: that they come, and that they stay away where cores are busy."""

import os
import signal
import time
from functools import cache

import numba
import pytest
import torch

from turnout.kernels.cpu import team
from turnout.kernels.cpu.phases import PHASE, begin, clock, end, now
from turnout.kernels.cpu.team import LONG, PhasedKernel, Team, floats, integers
from turnout.kernels.cpu.vectors import put_i64, take

SECOND = 1_000_000_000  # ns
SHORT = 20_000  # so that no thread takes all pieces before another has begun


def in_two_phases(phases, threads, given):
    """out [pieces] = the thread that took each piece of the first phase; it waits up to `patience` ns for all
    threads to be there, and others than the first hold a piece for `holds` ns. out [pieces] of the second:
    1000 times `factor`."""
    out, pieces, patience, holds = integers(given, 4)
    (factor,) = floats(given + 4 * 8, 1)
    begin(phases)
    number = take(phases + 8)
    until = clock() + patience
    while True:
        piece = take(phases)
        if piece >= pieces:
            break
        while now(phases + 8) < threads and clock() < until:
            pass
        free = clock() + (holds if number and holds else SHORT if patience else 0)
        while clock() < free:
            pass
        put_i64(out + piece * 8, number)
    end(phases)
    phases += PHASE
    begin(phases)
    while True:
        piece = take(phases)
        if piece >= pieces:
            break
        put_i64(out + (pieces + piece) * 8, int(factor * 1000))
    end(phases)


PIECES = 50


@cache
def kernel() -> PhasedKernel:
    """Compiled when first called: not by every worker that collects this file."""
    return PhasedKernel(numba.cfunc("void(int64, int64, int64)", nopython=True)(in_two_phases), 4, 1)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Team:
    monkeypatch.setattr(team, "_team", Team())
    return team._team


def call(threads: int, patience: int = 0, holds: int = 0) -> set[int]:
    """The numbers of the threads that took pieces."""
    out = torch.full((2, PIECES), -1)
    kernel()(threads, None, out.data_ptr(), PIECES, patience, holds, 1.5)
    assert (out[1] == 1500).all()
    return set(out[0].tolist())


def come(threads: int) -> set[int]:
    """Those of a call in which all take part, which busy cores may keep several calls from."""
    for _ in range(30):
        team._team._alone_until = time.monotonic_ns() - 1  # whatever waits there were
        if len(found := call(threads, patience=SECOND)) == threads:
            break
    return found


@pytest.mark.parametrize("threads", [2, 3])
def test_helpers_come(fresh: Team, threads: int) -> None:
    assert come(threads) == set(range(threads))


def test_one_thread_asks_for_none(fresh: Team) -> None:
    assert call(1, patience=SECOND) == {0}
    assert fresh._helpers == 0


def test_they_go_to_sleep_and_come_again(fresh: Team) -> None:
    for _ in range(3):
        assert len(come(2)) == 2
        until = time.monotonic() + 20
        while fresh._awake.value and time.monotonic() < until:
            time.sleep(0.001)
        assert fresh._awake.value == 0


def test_after_a_long_wait_calls_are_of_one_thread_for_a_while(fresh: Team) -> None:
    """As of a helper whose core another process took."""
    while not fresh._alone_until:
        call(2, patience=SECOND, holds=10 * LONG)
    if time.monotonic_ns() < fresh._alone_until - SECOND // 10:
        assert call(2, patience=SECOND // 50) == {0}
    assert len(come(2)) == 2


def test_many_short_calls(fresh: Team) -> None:
    """Slots are taken again while helpers are late."""
    for threads in (2, 3) * 2000:
        assert call(threads) <= {0, 1, 2}


def test_a_forked_process_has_helpers_of_its_own(fresh: Team) -> None:
    come(2)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if len(come(2)) == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
