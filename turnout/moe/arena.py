"""One block of device memory for all layers' scratch: made once, from bounds, never grown.

Layers run one after another, so they use the same bytes. Two models, or a model and its self-check,
do not: an arena belongs to those who ask for the same regions on the same device, and goes with the last.
The bytes are a plan's `workspace_bytes`, but for the output, which a call hands out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        self._device = device
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

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._bytes.data_ptr()

    def view(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As what `take` gave, wherever that was. offset: in elements."""
        return torch.empty(0, dtype=dtype, device=self._bytes.device).set_(
            self._bytes.untyped_storage(), offset, tuple(shape), tuple(stride)
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Another process has an arena of its own."""
        return shared, (self._device, self._sets)


_SHARED: WeakValueDictionary[tuple[object, ...], Arena] = WeakValueDictionary()


def shared(device: torch.device, sets: Mapping[Layout, Mapping[str, int]]) -> Arena:
    """The arena of all who ask for these regions on `device`."""
    key = (device, *((layout, *regions.items()) for layout, regions in sorted(sets.items())))
    found = _SHARED.get(key)
    if found is None:
        found = _SHARED[key] = Arena(device, sets)
    return found


def holding(tensor: Tensor) -> Arena | None:
    """The arena that `tensor` is a part of."""
    return next((arena for arena in _SHARED.values() if arena.holds(tensor)), None)
