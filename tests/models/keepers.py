"""A keeper of weights and a rank of it, in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from tests.ranks import forked
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
    """Of one function below; it shares nothing with the process that starts it but its arguments."""

    def __init__(self, function: Callable[..., None], *arguments: str | Connection):
        self.process: Any = forked(function, *arguments)

    def kill(self) -> None:
        self.process.kill()
        self.ends()

    def ends(self) -> int:
        """Its exit code."""
        self.process.join(60)
        assert self.process.exitcode is not None
        return self.process.exitcode


class Keeper(Process):
    def __init__(self) -> None:
        self.door, inside = Pipe()
        with inside:
            super().__init__(weight_keeper.run, inside)

    def view(self, device: str, fingerprint: str = "a") -> KeptWeights:
        return connect(self.door.fileno(), device, fingerprint)


class Rank(Process):
    def __init__(self, keeper: Keeper, device: str, tensors: int):
        """Keeps `some` of 0, 1, 2, ..."""
        self.told, theirs = Pipe()
        with theirs:
            super().__init__(_rank, keeper.door, theirs, device)
        for i in range(tensors):
            self.told.send(i)

    def holds(self, tensors: int, *, found: int) -> bool:
        """Whether it has that many with their values, of which it found some."""
        self.told.send("values")
        assert self.told.poll(120)
        values, *counts = self.told.recv()
        assert counts == [found, tensors - found]
        return all(value == some("cpu", float(i))().tolist() for i, value in enumerate(values))


def _rank(door: Connection, told: Connection, device: str) -> None:
    mine, kept = connect(door.fileno(), device), list[torch.Tensor]()
    while (word := told.recv()) is not None:
        if word == "values":
            told.send(([tensor.tolist() for tensor in kept], mine.found, mine.made))
        else:
            kept.append(mine.keep(f"tensor {word}", some(device, float(word))))
