"""Collectives of rows against plain arithmetic on every rank's input, which each rank can compute."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import Pools
from turnout.parallel.groups import GATHERED_SUM_BYTES, Group, ProcessGroup, SharedGroup, own_share, shares

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
SHAPES = ((0,), (1,), (7, 3), (5, 2, 2), (GATHERED_SUM_BYTES // 2,))  # the last is summed in two steps


def rows(rank: int, shape, dtype, salt: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(31 * rank + salt)
    if dtype.is_floating_point:
        return torch.randn(*shape, generator=draw).to(dtype)
    return torch.randint(0, 50, shape, generator=draw).to(dtype)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """In the order of ranks, in double precision, rounded once."""
    wide = torch.float64 if parts[0].is_floating_point() else torch.int64
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(parts[0].dtype)


def assert_sum(y: torch.Tensor, parts: list[torch.Tensor]) -> None:
    assert y.dtype == parts[0].dtype
    assert y.shape == parts[0].shape
    if not y.is_floating_point():
        assert torch.equal(y, summed(parts))
        return
    ulp = torch.finfo(y.dtype).eps * max(1.0, sum(part.abs().max() for part in parts) if y.numel() else 1.0)
    torch.testing.assert_close(y, summed(parts), rtol=0, atol=float(ulp))


def sums(rank, shared_memory):
    group = rank.groups(shared_memory=shared_memory).world
    assert isinstance(group, SharedGroup if shared_memory else ProcessGroup)
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = [rows(r, shape, dtype) for r in range(group.size)]
            assert_sum(group.all_reduce(parts[rank.number].clone()), parts)
            counts = [(3 * r + 1) % 5 for r in range(group.size)]  # 1, 4, 2
            wholes = [rows(r, (sum(counts), *shape[1:]), dtype) for r in range(group.size)]
            mine = [whole.split(counts)[rank.number] for whole in wholes]
            assert_sum(group.reduce_scatter(wholes[rank.number], counts), mine)


def small_numbers(rank):
    """1 and two halves of its last place: rounded after each addition, the sum would stay at 1."""
    group = rank.groups().world
    x = torch.tensor([1.0 if rank.number == 0 else 2.0**-8]).bfloat16()
    return group.all_reduce(x).item(), group.reduce_scatter(x.expand(group.size), [1] * group.size).item()


def moves(rank, shared_memory):
    group, n = rank.groups(shared_memory=shared_memory).world, rank.size
    for dtype in DTYPES:
        for counts in ([0] * n, [2] * n, [0, 3, 1][:n]):
            parts = [rows(r, (counts[r], 4), dtype) for r in range(n)]
            assert torch.equal(group.all_gather(parts[rank.number], counts), torch.cat(parts))
        sizes = [[(r + 2 * to) % 3 for to in range(n)] for r in range(n)]  # zeros among them
        sent = [[rows(r, (sizes[r][to], 3), dtype, salt=to) for to in range(n)] for r in range(n)]
        receive = [sizes[r][rank.number] for r in range(n)]
        got = group.all_to_all(torch.cat(sent[rank.number]), sizes[rank.number], receive)
        assert torch.equal(got, torch.cat([sent[r][rank.number] for r in range(n)]))


def same_bits(rank, shared_memory):
    """What every rank gets of two sums, by the one exchange of small tensors and the two of large ones."""
    group = rank.groups(shared_memory=shared_memory).world
    return [
        group.all_reduce(rows(rank.number, (size,), torch.float32))
        for size in (1000, GATHERED_SUM_BYTES // 4 + 1000)
    ]


def members(rank, sizes):
    found = rank.groups(**sizes)
    groups = (found.world, found.attention_tp, found.data_parallel)
    own = torch.tensor([rank.number])
    gathered = [group.all_gather(own, [1] * group.size).tolist() for group in groups]
    return gathered, [group.ranks for group in groups], [group.rank for group in groups], found.calls


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shared"])
@pytest.mark.parametrize("function", [sums, moves])
def test_against_plain_arithmetic(ranks: Pools, size, function, shared_memory):
    ranks(size).run(function, shared_memory)


def test_every_rank_gets_the_same_bits(ranks: Pools):
    first, *others = [bits for memory in (False, True) for bits in ranks(3).run(same_bits, memory)]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_bfloat16_is_summed_in_float32(ranks: Pools):
    assert ranks(3).run(small_numbers) == [(1.0078125, 1.0078125)] * 3


@pytest.mark.parametrize(
    ("sizes", "attention", "parallel"),
    [
        ({}, [[0, 1, 2, 3]] * 4, [[0], [1], [2], [3]]),
        ({"dp_size": 2}, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ({"dp_size": 4, "ep_size": 4}, [[0], [1], [2], [3]], [[0, 1, 2, 3]] * 4),
    ],
)
def test_who_belongs_together(ranks: Pools, sizes, attention, parallel):
    for number, (gathered, held, places, calls) in enumerate(ranks(4).run(members, sizes)):
        assert gathered == [[0, 1, 2, 3], attention[number], parallel[number]]
        assert [list(group) for group in held] == gathered
        assert places == [group.index(number) for group in gathered]
        assert calls >= sum(len(group) > 1 for group in gathered)


def test_a_group_of_one_moves_nothing():
    group, x = Group(), torch.randn(3, 2)
    assert group.all_reduce(x) is x
    assert group.all_gather(x, [3]) is group.reduce_scatter(x, [3]) is group.all_to_all(x, [3], [3]) is x


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_shares_are_even_and_whole(parts):
    for total in (0, 1, 7, 8, 17):
        split = shares(total, parts)
        assert sum(split) == total
        assert len(split) == parts
        assert max(split) - min(split) <= 1


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_every_token_is_sent_by_one_of_the_ranks_that_share_it(size: int, tokens: int):
    sent = []
    for rank in range(size):
        counts, mine = own_share(tokens, Group(range(size), rank))
        assert (sum(counts), len(counts)) == (tokens, size)
        assert len(range(tokens)[mine]) == counts[rank]
        sent += range(tokens)[mine]
    assert sent == list(range(tokens))
