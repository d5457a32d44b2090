"""A keeper of weights and a rank of it, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

import torch

from turnout.models import weight_keeper
from turnout.models.weight_keeper import OWN_BYTES, KeptWeights
from turnout.parallel.groups import SINGLE_RANK

WORDS = OWN_BYTES // 2  # of a tensor that is lent, in float32


def some(device: str, value: float = 0.0) -> Callable[[], torch.Tensor]:
    return lambda: torch.arange(WORDS, dtype=torch.float32, device=device) + value


def connect(door: int, device: str, fingerprint: str = "a") -> KeptWeights:
    """door: a descriptor, which stays open."""
    index = torch.cuda.current_device() if device == "cuda" else None
    return KeptWeights(os.dup(door), fingerprint, SINGLE_RANK, torch.device(device, index))


class Process:
    """Of this file; it needs nothing of the one that starts it, however that was started."""

    def __init__(self, *arguments: str | Connection):
        passed = [x.fileno() for x in arguments if isinstance(x, Connection)]
        words = [str(x.fileno()) if isinstance(x, Connection) else x for x in arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.models.keepers", *words], pass_fds=passed
        )

    def kill(self) -> None:
        self.process.kill()
        self.ends()

    def ends(self) -> int:
        """Its exit code."""
        return self.process.wait(60)


class Keeper(Process):
    def __init__(self) -> None:
        self.door, inside = Pipe()
        with inside:
            super().__init__("keeper", inside)

    def view(self, device: str, fingerprint: str = "a") -> KeptWeights:
        return connect(self.door.fileno(), device, fingerprint)


class Rank(Process):
    def __init__(self, keeper: Keeper, device: str, tensors: int):
        """Keeps `some` of 0, 1, 2, ..."""
        self.told, theirs = Pipe()
        with theirs:
            super().__init__("rank", keeper.door, theirs, device)
        for i in range(tensors):
            self.told.send(i)

    def holds(self, tensors: int, *, found: int) -> bool:
        """Whether it has that many with their values, of which it found some."""
        self.told.send("values")
        assert self.told.poll(120)
        values, *counts = self.told.recv()
        assert counts == [found, tensors - found]
        return all(value == some("cpu", float(i))().tolist() for i, value in enumerate(values))


def _rank(door: int, told: Connection, device: str) -> None:
    mine, kept = connect(door, device), list[torch.Tensor]()
    while (word := told.recv()) is not None:
        if word == "values":
            told.send(([tensor.tolist() for tensor in kept], mine.found, mine.made))
        else:
            kept.append(mine.keep(f"tensor {word}", some(device, float(word))))


if __name__ == "__main__":
    what, door, *rest = sys.argv[1:]
    if what == "keeper":
        weight_keeper.run(Connection(int(door)))
    _rank(int(door), Connection(int(rest[0])), rest[1])
