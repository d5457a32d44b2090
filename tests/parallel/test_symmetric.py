"""Symmetric memory of CPU ranks: everyone's part is seen at the address that everyone has for it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.ranks import Pools, Rank
from turnout.errors import UserError
from turnout.parallel import symmetric
from turnout.parallel.groups import SINGLE_RANK
from turnout.parallel.symmetric import PeerError, SymmetricMemory, agree, allocate

CPU = torch.device("cpu")


def written(rank: Rank) -> tuple[list[int], list[int]]:
    """Each rank writes its number into byte `rank` of everyone's part."""
    group = rank.groups().world
    memory = allocate(group, 4096, CPU)
    assert (memory.rank, memory.size, len(memory.own_B)) == (rank.number, rank.size, 4096)
    assert memory.addresses_R[rank.number] == memory.own_B.data_ptr()
    before = memory.own_B[: rank.size].tolist()
    group.all_gather(torch.zeros(1), [1] * rank.size)
    for address in memory.addresses_R.tolist():
        ctypes.memset(address + rank.number, rank.number + 1, 1)
    group.all_gather(torch.zeros(1), [1] * rank.size)
    return before, memory.own_B[: rank.size].tolist()


def test_everyone_writes_to_everyone(ranks: Pools):
    assert ranks(2).run(written) == [([0, 0], [1, 2])] * 2


def disagreeing(rank: Rank) -> str:
    world = rank.groups().world
    agree(world, {"top-k": 2}, CPU, "never said")
    with pytest.raises(UserError) as told:
        agree(world, {"top-k": 2, "hidden size": 64 + rank.number}, CPU, "Use equal flags.")
    return str(told.value)


def test_ranks_that_differ_are_told_how_and_what_to_do(ranks: Pools):
    expected = "ranks must have the same hidden size, and have rank 0: 64, rank 1: 65. Use equal flags."
    assert ranks(2).run(disagreeing) == [expected] * 2


def told(memory: SymmetricMemory, phase: int, peer: int, number: int) -> str:
    memory.told.fill_(phase << 52 | peer << 40 | number)
    with pytest.raises(PeerError) as error:
        symmetric.check_all()
    memory.told.zero_()
    return str(error.value)


def test_what_a_kernel_leaves_becomes_an_error():
    memory = allocate(SINGLE_RANK.world, 128, CPU)
    symmetric.check_all()
    assert told(memory, 1, 3, 5 << 20).startswith(
        "rank 0 gave up waiting for rank 3 in dispatch of epoch 5242880"
    )
    assert told(memory, 2, 0, 1).startswith("rank 0 gave up waiting for rank 0 in combine of epoch 1:")
    assert "rank 7 brought 99 tokens" in told(memory, 3, 7, 99)
    symmetric.check_all()
