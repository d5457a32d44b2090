"""The step exchange between real processes, and what a rank must not believe."""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from pathlib import Path

import pytest

from tests.ranks import Pools, Rank
from turnout.parallel.exchange import CHECK, FIELDS, NUMBER, SharedExchange, StepRecord
from turnout.parallel.group_exchange import GroupExchange

COUNT = 300


def said(rank: int, number: int) -> StepRecord:
    """Different for every rank and exchange, in every field, and as large as a field may be."""
    return StepRecord(
        tokens=1000 * number + rank,
        phase=number % 3,
        near_tie_tokens=rank,
        received=2**40 + number,
        executed=2**40 - number,
        digest=-number,
        leaving=number % 2,
        next_prompts=(number + rank) % 3,
        step_us=7 * number + rank,
        longest=2**20 * number + rank,
    )


def unevenly(rank: Rank, count: int) -> int:
    """Exchange `count` times, each rank late when it likes; how many exchanges were wrong."""
    exchange = SharedExchange(rank.folder / "steps", rank.number, rank.size)
    draw = random.Random(rank.number)
    wrong = 0
    for number in range(count):
        if draw.random() < 0.05:
            time.sleep(draw.random() * 0.005)
        told = exchange(said(rank.number, number))
        wrong += told != [said(other, number) for other in range(rank.size)]
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_everyone_hears_everyone_in_the_same_exchange(ranks: Pools, size: int):
    assert ranks(size).run(unevenly, COUNT) == [0] * size


def twice(rank: Rank) -> list[int]:
    """Two exchanges, one after the other, each with a file of its own."""
    found = []
    for run in ("first", "second"):
        exchange = SharedExchange(rank.folder / run, rank.number, rank.size)
        found += [record.tokens for record in exchange(StepRecord(tokens=rank.number + len(run)))]
    return found


def test_runs_with_files_of_their_own_do_not_meet(ranks: Pools):
    assert ranks(2).run(twice) == [[5, 6, 6, 7]] * 2


def waits_long(rank: Rank, seconds: float) -> tuple[float, float]:
    """Seconds of CPU and on the clock of a wait for the last rank, which comes late."""
    exchange = SharedExchange(rank.folder / "steps", rank.number, rank.size)
    exchange(StepRecord())
    if rank.number == rank.size - 1:
        time.sleep(seconds)
    before, began = time.process_time(), time.monotonic()
    exchange(StepRecord())
    return time.process_time() - before, time.monotonic() - began


def test_waiting_leaves_the_cores_to_others(ranks: Pools):
    for used, waited in ranks(2).run(waits_long, 1.0):  # longer, where the last rank has to wait for a core
        assert used < 0.2 * max(1.0, waited)


def through_groups(rank: Rank) -> list[list[StepRecord]]:
    exchange = GroupExchange(rank.groups().world)
    return [exchange(said(rank.number, number)) for number in range(5)]


def test_between_hosts_it_says_the_same(ranks: Pools):
    expected = [[said(other, number) for other in range(2)] for number in range(5)]
    assert ranks(2).run(through_groups) == [expected] * 2


class Torn:
    """Rank 1 as a half-blind writer: its words reach the memory one by one, in any order."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDWR)

    def write(self, at: int, data: bytes) -> None:
        os.pwrite(self.descriptor, data, at)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[SharedExchange, Torn]:
    exchange = SharedExchange(tmp_path / "steps", 0, 2)
    return exchange, Torn(tmp_path / "steps")


def slot(number: int, record: StepRecord) -> tuple[int, bytes]:
    """Where rank 1 of 2 writes in exchange `number`, and what."""
    payload = NUMBER.pack(number) + FIELDS.pack(*record)
    return (2 + number % 2) * 128, payload + CHECK.pack(zlib.crc32(payload))


class Listening(threading.Thread):
    """Rank 0 in its next exchange; `heard` is what came of it."""

    def __init__(self, exchange: SharedExchange):
        super().__init__(daemon=True)
        self.exchange = exchange
        self.heard: list[StepRecord] | None = None
        self.start()

    def run(self) -> None:
        self.heard = self.exchange(StepRecord())


@pytest.mark.parametrize("missing", range(0, NUMBER.size + FIELDS.size, 8), ids=lambda at: f"word {at // 8}")
def test_a_half_written_record_is_not_believed(pair: tuple[SharedExchange, Torn], missing: int):
    exchange, torn = pair
    at, data = slot(1, said(1, 1))
    torn.write(at, data[:missing] + bytes(8) + data[missing + 8 :])
    listening = Listening(exchange)
    listening.join(0.05)
    assert listening.heard is None
    torn.write(at, data)
    listening.join(60)
    assert listening.heard == [StepRecord(), said(1, 1)]


def test_what_an_earlier_exchange_left_is_not_believed(pair: tuple[SharedExchange, Torn]):
    exchange, torn = pair
    for number in range(1, 6):
        listening = Listening(exchange)
        listening.join(0.02)
        assert listening.heard is None, f"exchange {number} took what exchange {number - 2} left"
        torn.write(*slot(number, said(1, number)))
        listening.join(60)
        assert listening.heard == [StepRecord(), said(1, number)]
