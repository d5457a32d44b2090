"""What ranks tell each other through a process group, on the CPU: step records between hosts, any values."""

from __future__ import annotations

import pickle
from itertools import accumulate
from typing import Any

import torch

from turnout.parallel.exchange import StepRecord
from turnout.parallel.groups import Group


class GroupExchange:
    """An `exchange.StepExchange` over `world`, a group that moves host tensors."""

    def __init__(self, world: Group):
        self._world = world

    def __call__(self, record: StepRecord) -> list[StepRecord]:
        own_1F = torch.tensor([record], dtype=torch.int64)
        all_RF = self._world.all_gather(own_1F, [1] * self._world.size)
        return [StepRecord(*values) for values in all_RF.tolist()]


def gather_values(group: Group, value: Any) -> list[Any]:
    """Everyone's value, in the order of ranks. Values are pickled: the ranks are one program."""
    own_B = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = group.all_gather(torch.tensor([len(own_B)]), [1] * group.size).tolist()
    data = group.all_gather(own_B, sizes).numpy().tobytes()
    return [pickle.loads(data[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]
