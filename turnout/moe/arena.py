"""One block of device memory for all layers' scratch: made once, from bounds, never grown.

Layers run one after another, so they use the same bytes. Two models, or a model and its self-check,
do not: an arena belongs to those who ask for the same regions on the same device, and goes with the last.
The bytes are a plan's `workspace_bytes`, but for the output, which a call hands out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from turnout.moe.budget import ARENA_ALIGN, aligned, arena_bytes
from turnout.vocabulary import Layout


class Arena:
    """Zeroed bytes, cut into regions of names and sizes; a set of regions per layout of batches.

    Sets begin at the same address, for one batch runs at a time. Regions follow each other in their order,
    each aligned; what comes first with the same size in every set is the same memory.
    """

    def __init__(self, device: torch.device, sets: Mapping[Layout, Mapping[str, int]]) -> None:
        size = max(arena_bytes(regions) for regions in sets.values())
        self._bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._sets = {layout: dict(regions) for layout, regions in sets.items()}

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes

    def take(self, layout: Layout, name: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """The first of region `name`, as a tensor. Raises RuntimeError for more than was planned."""
        regions = self._sets.get(layout, {})
        wanted, planned = math.prod(shape) * dtype.itemsize, regions.get(name, 0)
        if wanted > planned:
            raise RuntimeError(
                f"workspace {name!r} of layout {layout!r}: {wanted} bytes wanted, {planned} planned; the "
                "batch is larger than the bounds of the plan"
            )
        begin = 0
        for other, size in regions.items():
            if other == name:
                break
            begin += aligned(size, ARENA_ALIGN)
        return self._bytes[begin : begin + wanted].view(dtype).view(shape)


_SHARED: WeakValueDictionary[tuple[object, ...], Arena] = WeakValueDictionary()


def shared(device: torch.device, sets: Mapping[Layout, Mapping[str, int]]) -> Arena:
    """The arena of all who ask for these regions on `device`."""
    key = (device, *((layout, *regions.items()) for layout, regions in sorted(sets.items())))
    found = _SHARED.get(key)
    if found is None:
        found = _SHARED[key] = Arena(device, sets)
    return found
