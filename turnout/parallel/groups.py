"""Process groups: the collectives of the ranks that a topology names, and how ranks find each other.

A `Group` moves rows, dimension 0 of a tensor. Every call is collective: all its ranks make it, in the same
order, with rows or without. A group of one rank does nothing and needs no process group, so that a layer
runs by itself without torch.distributed.

All results are the same bits on every rank of the group that gets them. Between CPUs, sums are made in the
order of ranks, in float32 at least. NCCL's own are used on GPUs: it rounds to the tensor's dtype at each hop,
in an order that varies with the place of a value. With `fixed_order`, sums on GPUs are made as between CPUs.

Legend: R rows of this rank, n ranks of the group.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from turnout.parallel import shared
from turnout.parallel.shared import SharedMemory
from turnout.parallel.topology import Topology

JOIN_SECONDS = 600  # for all ranks to arrive when a group is made
GATHERED_SUM_BYTES = 1 << 16  # on CPUs: below, one exchange costs less than the two of a scattered sum


class Group:
    """Ranks that call each other; this class is the group of one.

    ranks: their global ranks, ascending. rank: the place of this one. calls: collectives begun so far, by
    which a watchdog tells the rank that others wait for.
    """

    def __init__(self, ranks: Sequence[int] = (0,), rank: int = 0):
        self.ranks, self.rank = tuple(ranks), rank
        self.calls = 0

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of `x`, which may be overwritten; the same shape on all ranks."""
        return x

    def all_gather(self, x_R: Tensor, counts: Sequence[int]) -> Tensor:
        """[sum(counts), ...]: everyone's rows in the order of ranks; rank i brings counts[i]."""
        return x_R

    def reduce_scatter(self, x_R: Tensor, counts: Sequence[int]) -> Tensor:
        """x [sum(counts), ...] on every rank -> [counts[rank], ...], this rank's rows summed over ranks."""
        return x_R

    def all_to_all(self, x_R: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """The next send[i] rows go to rank i, receive[i] come from it: [sum(receive), ...]."""
        return x_R


class ProcessGroup(Group):
    """Ranks that talk through torch.distributed: gloo between CPUs, NCCL between GPUs."""

    def __init__(self, ranks: Sequence[int], rank: int, handle: dist.ProcessGroup, *, fixed_order: bool):
        super().__init__(ranks, rank)
        self._handle, self._fixed_order = handle, fixed_order

    def all_reduce(self, x: Tensor) -> Tensor:
        # gloo's own takes twice as long, and its order depends on the size
        if x.device.type == "cpu" or self._fixed_order:
            return _all_reduce(self, x)
        self.calls += 1
        dist.all_reduce(x, group=self._handle)
        return x

    def all_gather(self, x_R: Tensor, counts: Sequence[int]) -> Tensor:
        if x_R.device.type == "cpu":  # gloo's own wants equal counts, and takes longer
            copies = x_R.expand(self.size, *x_R.shape).flatten(0, 1)
            return self.all_to_all(copies, [len(x_R)] * self.size, counts)
        self.calls += 1
        x_R, out = x_R.contiguous(), x_R.new_empty(sum(counts), *x_R.shape[1:])
        if len(set(counts)) == 1:
            _all_gather(out, x_R, group=self._handle)
        else:  # the same rows to everyone, without a copy for each
            dist.all_to_all(list(out.split(list(counts))), [x_R] * self.size, group=self._handle)
        return out

    def reduce_scatter(self, x_R: Tensor, counts: Sequence[int]) -> Tensor:
        own = counts[self.rank]
        if x_R.device.type != "cpu" and len(set(counts)) == 1 and not self._fixed_order:
            self.calls += 1
            out = x_R.new_empty(own, *x_R.shape[1:])
            _reduce_scatter(out, x_R.contiguous(), group=self._handle)
            return out
        return _reduce_scatter_by_parts(self, x_R, counts)

    def all_to_all(self, x_R: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        self.calls += 1
        out = x_R.new_empty(sum(receive), *x_R.shape[1:])
        dist.all_to_all_single(out, x_R.contiguous(), list(receive), list(send), group=self._handle)
        return out


class SharedGroup(Group):
    """Ranks of one host that move tensors on the CPU through shared memory."""

    def __init__(self, ranks: Sequence[int], rank: int, memory: SharedMemory):
        super().__init__(ranks, rank)
        self._memory = memory

    def all_reduce(self, x: Tensor) -> Tensor:
        return _all_reduce(self, x)

    def all_gather(self, x_R: Tensor, counts: Sequence[int]) -> Tensor:
        return self._move(x_R, [(0, len(x_R))] * self.size, sum(counts))

    def reduce_scatter(self, x_R: Tensor, counts: Sequence[int]) -> Tensor:
        return _reduce_scatter_by_parts(self, x_R, counts)

    def all_to_all(self, x_R: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        bounds = [0, *itertools.accumulate(send)]
        return self._move(x_R, list(itertools.pairwise(bounds)), sum(receive))

    def _move(self, x_R: Tensor, spans: Sequence[tuple[int, int]], rows: int) -> Tensor:
        """spans: which rows are for whom."""
        self.calls += 1
        out = x_R.new_empty(rows, *x_R.shape[1:])
        row = x_R[0].nbytes if len(x_R) else 0
        self._memory.move(_bytes(x_R.contiguous()), [(row * a, row * b) for a, b in spans], _bytes(out))
        return out


def _all_reduce(group: Group, x: Tensor) -> Tensor:
    rows = x.reshape(-1)
    if x.nbytes <= GATHERED_SUM_BYTES:
        whole = [rows.numel()] * group.size
        return _sum(group.all_gather(rows, whole).view(group.size, *x.shape))
    parts = [len(part) for part in rows.tensor_split(group.size)]
    return group.all_gather(group.reduce_scatter(rows, parts), parts).view(x.shape)


def _reduce_scatter_by_parts(group: Group, x_R: Tensor, counts: Sequence[int]) -> Tensor:
    own = counts[group.rank]
    parts = group.all_to_all(x_R, counts, [own] * group.size)
    return _sum(parts.view(group.size, own, *x_R.shape[1:]))


def _sum(parts: Tensor) -> Tensor:
    """The sum over dimension 0, in its order; floats are summed in float32 and rounded once."""
    exact = torch.float32 if parts.is_floating_point() and parts.itemsize < 4 else parts.dtype
    total = parts[0].to(exact)
    for part in parts[1:]:  # `sum` has an order of its own, which varies with the place of a value
        total = total + part
    return total.to(parts.dtype)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


RENAMED = hasattr(dist, "all_gather_single")  # in torch 2.13
_all_gather = dist.all_gather_single if RENAMED else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if RENAMED else dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups that this rank belongs to.

    world:         all ranks
    attention_tp:  those that share this DP group's requests
    data_parallel: one of each DP group, with the same attention-TP rank; its rank is the DP rank
    """

    topology: Topology = field(default_factory=Topology)
    world: Group = field(default_factory=Group)
    attention_tp: Group = field(default_factory=Group)
    data_parallel: Group = field(default_factory=Group)

    @property
    def calls(self) -> int:
        """Collectives begun on any of them."""
        return self.world.calls + self.attention_tp.calls + self.data_parallel.calls


SINGLE_RANK = Groups()


def connect(
    topology: Topology,
    *,
    init_method: str,
    device: torch.device,
    timeout: float = JOIN_SECONDS,
    shared_memory: bool = True,
    fixed_order: bool = False,
) -> Groups:
    """Meet the other ranks and make the groups; collective. Nothing to meet for a single rank.

    init_method: where, as torch.distributed has it: "file:///path" for one host, "tcp://host:port" of rank
    0 for several, "env://" under torchrun. CUDA ranks talk over NCCL and, for host values, gloo. CPU ranks
    of one host meet over gloo and talk through shared memory, if `shared_memory` and the host let them.
    fixed_order: of all sums, at the price of moving every part by itself.
    """
    if topology.tp_size == 1:
        return Groups(topology=topology)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=topology.rank,
        world_size=topology.tp_size,
        timeout=timedelta(seconds=timeout),
        device_id=None if device.type == "cpu" else device,
    )
    attention, stride = topology.attention_tp_groups(), topology.attention_tp
    parallel = [list(range(first, topology.tp_size, stride)) for first in range(stride)]
    partitions = ([list(range(topology.tp_size))], attention, parallel)
    found = [_own_group(partition, topology.rank, fixed_order) for partition in partitions]
    if shared_memory and device.type == "cpu" and topology.nnodes == 1:
        found = [_through_shared_memory(group) for group in found]
    world, attention_tp, data_parallel = found
    return Groups(topology=topology, world=world, attention_tp=attention_tp, data_parallel=data_parallel)


def disconnect() -> None:
    """Leave the groups made by `connect`, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _own_group(partition: Sequence[Sequence[int]], rank: int, fixed_order: bool) -> Group:
    """The member of `partition` that holds `rank`; every rank makes every group, as torch demands."""
    own = next(ranks for ranks in partition if rank in ranks)
    handles = {tuple(ranks): dist.new_group(list(ranks)) for ranks in partition if len(ranks) > 1}
    if len(own) == 1:
        return Group(own)
    return ProcessGroup(own, own.index(rank), handles[tuple(own)], fixed_order=fixed_order)


def _through_shared_memory(group: Group) -> Group:
    """The same ranks through shared memory, or `group` if any of them cannot; collective."""
    if group.size == 1:
        return group
    one_each = [1] * group.size
    own = shared.create(group.size) if shared.SUPPORTED and group.rank == 0 else -1
    said = torch.tensor([[os.getpid(), own, *shared.identity(own)]])
    everyone = group.all_gather(said, one_each).tolist()
    memory = shared.attach(everyone[0], group.rank, [process for process, *_ in everyone])
    all_can = bool(group.all_gather(torch.tensor([memory is not None]), one_each).all())
    if own >= 0:
        os.close(own)
    return SharedGroup(group.ranks, group.rank, memory) if all_can and memory is not None else group


def shares(total: int, parts: int) -> list[int]:
    """`total` rows split over `parts` ranks as evenly as can be, the first ones taking what is left over."""
    bounds = [-(-total * i // parts) for i in range(parts + 1)]
    return [end - start for start, end in itertools.pairwise(bounds)]


def own_share(total: int, group: Group) -> tuple[list[int], slice]:
    """The `shares` of the ranks of `group`, and which rows are this one's."""
    counts = shares(total, group.size)
    start = sum(counts[: group.rank])
    return counts, slice(start, start + counts[group.rank])
