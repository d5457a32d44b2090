"""The harness itself: what it returns, and that no failure of a rank is lost or waited for in vain."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.conftest import one_of
from tests.ranks import Pools, RankFailed, RankPool
from turnout.errors import UserError


def total(rank, sizes, value):
    groups = rank.groups(**sizes)
    return groups.world.all_reduce(torch.tensor([float(value + rank.number)])), os.getpid()


def write_and_read(rank):
    groups = rank.groups()
    (rank.folder / str(rank.number)).write_text("here")
    groups.world.all_reduce(torch.zeros(1))
    return sorted(path.name for path in rank.folder.iterdir())


def fail_on_one(rank):
    groups = rank.groups()
    if rank.number == 1:
        raise UserError("correct this")
    groups.world.all_reduce(torch.zeros(1))


def die_on_one(rank):
    if rank.number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hang(rank):
    time.sleep(60)


def test_ranks_are_kept_and_meet_in_any_arrangement(ranks: Pools):
    processes = set()
    for value, sizes in enumerate(({}, {}, {"dp_size": 2}, {"ep_size": 2, "dp_size": 2}, {"ep_size": 2})):
        answers = ranks(2).run(total, sizes, value)
        assert [float(sums) for sums, _ in answers] == [2 * value + 1] * 2
        processes |= {process for _, process in answers}
    assert len(processes) == 2


def test_a_folder_for_every_run(ranks: Pools):
    for _ in range(2):
        assert ranks(2).run(write_and_read) == [["0", "1"]] * 2


@pytest.mark.parametrize(
    ("function", "timeout", "error", "match"),
    [
        (fail_on_one, 60, UserError, "correct this"),
        (die_on_one, 60, RankFailed, "rank 0 died"),
        (hang, 0.5, RankFailed, r"rank\(s\) \[0, 1\] silent after 0.5 s"),
    ],
)
def test_a_failure_ends_all_ranks_at_once_and_the_next_run_works(function, timeout, error, match):
    pool = RankPool(2)
    try:
        start = time.monotonic()
        with pytest.raises(error, match=match) as caught:
            pool.run(function, timeout=timeout)
        assert time.monotonic() - start < 40  # of the 60 s that the others would go on
        if error is UserError:
            assert "on rank 1" in caught.value.__notes__[0]
        assert [float(sums) for sums, _ in pool.run(total, {}, 0)] == [1.0, 1.0]
    finally:
        pool.close()


def test_workers_take_gpus_in_turn():
    assert [one_of("4,6,7", worker) for worker in range(5)] == ["4", "6", "7", "4", "6"]
    assert one_of("", 3) == "", "there is none to take"
