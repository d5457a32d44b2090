"""Shared memory between ranks: messages larger than a slot, ranks that end, hosts that do not let them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.ranks import Pools, Rank, RankFailed, RankPool
from turnout.parallel import shared
from turnout.parallel.groups import ProcessGroup
from turnout.parallel.shared import SharedMemory

SLOT = 64


def attached(rank: Rank, slot: int) -> SharedMemory:
    """As `groups.connect` does it, with slots of a given size."""
    group = rank.groups(shared_memory=False).world
    own = shared.create(rank.size, slot) if rank.number == 0 else -1
    processes, descriptors = zip(
        *group.all_gather(torch.tensor([[os.getpid(), own]]), [1] * rank.size).tolist(), strict=True
    )
    descriptor = os.open(f"/proc/{processes[0]}/fd/{descriptors[0]}", os.O_RDWR)
    try:
        return SharedMemory(descriptor, rank.number, processes, slot)
    finally:
        os.close(descriptor)


def messages(rank: Rank) -> None:
    """Lengths below, at and above multiples of a slot, unlike from rank to rank; spans that overlap."""
    memory, n = attached(rank, SLOT), rank.size
    draw = torch.Generator().manual_seed(0)
    for length in (0, 1, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT + 3, 0, 2 * SLOT):
        lengths = [(length * (r + 1)) // 2 for r in range(n)]
        sent = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw) for size in lengths]
        spans = [[(to * size // (n + 1), size) for to in range(n)] for size in lengths]
        wanted = [data[slice(*parts[rank.number])] for data, parts in zip(sent, spans, strict=True)]
        out = torch.zeros(sum(map(len, wanted)), dtype=torch.uint8)
        memory.move(sent[rank.number], spans[rank.number], out)
        assert torch.equal(out, torch.cat(wanted))


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_any_length(ranks: Pools, size):
    ranks(size).run(messages)


def end_on_one(rank: Rank, folder: Path) -> None:
    group = rank.groups().world
    group.all_reduce(torch.ones(1))
    if rank.number == 1:
        os._exit(3)
    try:
        group.all_reduce(torch.ones(1))
    except ConnectionError as error:
        (folder / "noticed").write_text(str(error))


def test_the_end_of_a_rank_is_noticed_by_those_that_wait(tmp_path):
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailed, match="rank 1 died"):
            pool.run(end_on_one, tmp_path)
    finally:
        pool.close()
    assert "has ended" in (tmp_path / "noticed").read_text()


def without_on_one(rank: Rank) -> bool:
    shared.SUPPORTED = rank.number != 1
    try:
        world = rank.groups(dp_size=rank.size).world
        assert world.all_reduce(torch.ones(2)).tolist() == [rank.size] * 2
        return isinstance(world, ProcessGroup)
    finally:
        shared.SUPPORTED = True


def test_all_ranks_talk_over_gloo_if_one_cannot_share():
    pool = RankPool(2)
    try:
        assert pool.run(without_on_one) == [True, True]
    finally:
        pool.close()


def leave(rank: Rank) -> int:
    """Open descriptors after meeting and leaving many times."""
    for sizes in ({}, {"dp_size": 2}) * 3:
        rank.groups(**sizes).world.all_reduce(torch.ones(1))
    return len(list(Path("/proc/self/fd").iterdir()))


def test_leaving_gives_everything_back(ranks: Pools):
    first = ranks(2).run(leave)
    assert max(ranks(2).run(leave)) <= max(first)
