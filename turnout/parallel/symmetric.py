"""Memory of the same size on every rank, which all of them can write: what one-sided kernels talk through.

On CUDA it is torch's symmetric memory, peers' pages mapped over NVLink, without multicast. On CPUs it is
shared memory, for Triton's interpreter: the same kernels, and their order of stores and loads, which x86
keeps, without a GPU. A single rank has ordinary memory.

Regions are zero when made, which is collective, and live as long as somebody holds them. Waiting is the
business of kernels, and so is giving up: one that waits too long leaves a word in `failed`, on the device,
by which all later ones know, and the same in `told`, which the host reads without waiting for the device.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from turnout.errors import UserError
from turnout.parallel.groups import Group

SPIN_SECONDS = 20.0  # that a kernel waits for a peer
PHASES = {1: "dispatch", 2: "combine", 3: "capacity"}
EPOCH_BITS, PEER_BITS = 40, 12


class PeerError(RuntimeError):
    """A rank did not do its part of an exchange in time, or brought more than there is room for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SymmetricMemory:
    """One rank's view of a region on every rank.

    own_B: uint8, this rank's part. addresses_R: int64, where each rank's part begins, on the device.
    failed, told: int64 [1], zero or what `kernels.nvlink.waiting.failure` made; `told` is on the host.
    """

    rank: int
    own_B: Tensor
    addresses_R: Tensor
    failed: Tensor
    told: Tensor
    _kept: tuple[object, ...] = field(default=(), repr=False)  # whatever keeps peers' memory mapped

    @property
    def size(self) -> int:
        return len(self.addresses_R)

    def check(self) -> None:
        """Raise PeerError if a kernel has given up. Reads the host's memory: no wait for the device."""
        word = int(self.told)
        if word == 0:
            return
        number = word & ((1 << EPOCH_BITS) - 1)
        peer = (word >> EPOCH_BITS) & ((1 << PEER_BITS) - 1)
        phase = PHASES[word >> (EPOCH_BITS + PEER_BITS)]
        if phase == "capacity":
            raise PeerError(
                f"rank {self.rank}: rank {peer} brought {number} tokens to an exchange that this rank "
                "entered with room for fewer; every rank must be told how many each brings"
            )
        raise PeerError(
            f"rank {self.rank} gave up waiting for rank {peer} in {phase} of epoch {number}: it has ended, "
            "it stalls, or it makes other calls than the rest; restart all ranks"
        )


_ALIVE: WeakSet[SymmetricMemory] = WeakSet()


def check_all() -> None:
    """`check` of every region of this process: after steps whose replayed graphs no dispatcher watched."""
    for memory in list(_ALIVE):
        memory.check()


def allocate(group: Group, size: int, device: torch.device) -> SymmetricMemory:
    """`size` bytes on every rank of `group`, which is that of all ranks; collective."""
    if group.size == 1:
        return _view(0, torch.zeros(size, dtype=torch.uint8, device=device), [], device)
    if device.type == "cpu":
        return _shared(group, size)
    return _on_gpus(group, size, device)


def agree(group: Group, what: Mapping[str, int], device: torch.device, remedy: str) -> None:
    """Raise UserError, on every rank, unless all have the same values of `what`; collective."""
    own = torch.tensor([list(what.values())], dtype=torch.int64, device=device)
    everyone_RN = group.all_gather(own, [1] * group.size).cpu()
    for name, values_R in zip(what, everyone_RN.T.tolist(), strict=True):
        if len(set(values_R)) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values_R))
            raise UserError(f"ranks must have the same {name}, and have {listed}. {remedy}")


def _on_gpus(group: Group, size: int, device: torch.device) -> SymmetricMemory:
    from torch.distributed import _symmetric_memory as torch_memory

    # Multicast objects are a resource of the whole NVLink domain, and nothing here uses them.
    os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if torch_memory.get_backend(device) != "CUDA":
        torch_memory.set_backend("CUDA")
    own_B = torch_memory.empty(size, dtype=torch.uint8, device=device)
    own_B.zero_()
    handle = torch_memory.rendezvous(own_B, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    torch.cuda.synchronize(device)
    group.all_gather(torch.zeros(1, device=device), [1] * group.size)  # no rank writes before all are zero
    torch.cuda.synchronize(device)
    return _view(group.rank, own_B, list(handle.buffer_ptrs), device, handle)


def _shared(group: Group, size: int) -> SymmetricMemory:
    """Each rank's part is a file without a name, which the others open through its process."""
    descriptor = os.memfd_create("turnout-symmetric")
    os.ftruncate(descriptor, size)
    said = torch.tensor([[os.getpid(), descriptor]])
    everyone = group.all_gather(said, [1] * group.size).tolist()
    parts = []
    for process, theirs in everyone:
        mine = os.open(f"/proc/{process}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
        parts.append(torch.frombuffer(mmap.mmap(mine, size), dtype=torch.uint8))
        os.close(mine)
    group.all_gather(torch.zeros(1), [1] * group.size)  # everyone has opened everything
    os.close(descriptor)
    addresses = [part.data_ptr() for part in parts]
    return _view(group.rank, parts[group.rank], addresses, torch.device("cpu"), *parts)


def _view(
    rank: int, own_B: Tensor, addresses: list[int], device: torch.device, *kept: object
) -> SymmetricMemory:
    memory = SymmetricMemory(
        rank=rank,
        own_B=own_B,
        addresses_R=torch.tensor(addresses or [own_B.data_ptr()], dtype=torch.int64, device=device),
        failed=torch.zeros(1, dtype=torch.int64, device=device),
        told=torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda"),
        _kept=kept,
    )
    _ALIVE.add(memory)
    return memory
