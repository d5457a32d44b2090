"""Page-locked memory that dense weights pass on their way from files to a GPU."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

BYTES = 1 << 25


class Staging:
    """The same memory for one weight after the other, since fresh memory has first to be mapped page by page,
    and copies from memory that is not page-locked are slow.

    It is not from torch's allocator, which would keep it when all is loaded.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    @property
    def memory(self) -> Tensor:
        """uint8 [BYTES], from the first use on until `close`."""
        if self._memory is None:
            memory = torch.frombuffer(mmap.mmap(-1, BYTES), dtype=torch.uint8)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), BYTES, 0))
            self._memory = memory
        return self._memory

    def close(self) -> None:
        """Free it; copies from it have ended."""
        memory, self._memory = self._memory, None
        if memory is not None:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
