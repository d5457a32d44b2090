"""The board as its reader sees it, across processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.server.processes import eventually
from turnout.parallel.health import Board, Pulse, Reading

RANK = """
import sys, time
from pathlib import Path
from turnout.parallel.health import Board, Pulse
pulse = Pulse(Board(Path(sys.argv[1]), 2), 1)
pulse.collectives = lambda: 5
pulse.note(7, "decode")
time.sleep(60)
"""


def test_a_rank_is_read_from_another_process_until_it_stops(tmp_path: Path):
    board = Board(tmp_path / "board", 2)
    assert board.read(1) == Reading()
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path / "board")])
    try:
        assert eventually(lambda: board.read(1).phase == "decode")
        reading = board.read(1)
        assert (reading.step, reading.collectives) == (7, 5)
        assert eventually(lambda: board.read(1).beats > reading.beats)
        rank.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        stopped = board.read(1)
        time.sleep(0.6)
        assert board.read(1) == stopped
        rank.send_signal(signal.SIGCONT)
        assert eventually(lambda: board.read(1).beats > stopped.beats)
        assert board.read(0) == Reading()
    finally:
        rank.kill()
        rank.wait()


def test_collectives_are_counted_between_notes(tmp_path: Path):
    """A rank inside a long forward notes nothing, but its thread sees what it has begun."""
    board = Board(tmp_path / "board", 1)
    pulse = Pulse(board, 0)
    begun = [1]
    pulse.collectives = lambda: begun[0]
    pulse.note(3, "prefill")
    begun[0] = 9
    assert eventually(lambda: board.read(0).collectives == 9)


def test_who_is_behind():
    readings = [
        Reading(step=4, phase="decode", collectives=20),
        Reading(step=4, phase="agreeing", collectives=20),
        Reading(step=4, phase="decode", collectives=21),
        Reading(step=5, phase="agreeing", collectives=22),
    ]
    assert sorted(readings, key=lambda reading: reading.progress) == [readings[i] for i in (1, 0, 2, 3)]
