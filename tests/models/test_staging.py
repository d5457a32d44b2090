"""Staging memory: page-locked from its first use until it is closed, and then gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from turnout.models.staging import BYTES, Staging


def test_memory_is_locked_once_and_unlocked_when_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    def lock(address: int, size: int, flags: int) -> int:
        calls.append(("lock", address))
        return size - BYTES

    def unlock(address: int) -> int:
        calls.append(("unlock", address))
        return 0

    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=unlock)
    checked: list[int] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", checked.append)
    staging = Staging()
    staging.close()
    assert not calls
    memory = staging.memory
    memory.fill_(7)
    assert staging.memory is memory
    assert (memory.dtype, memory.nbytes) == (torch.uint8, BYTES)
    assert memory.data_ptr() % 4096 == 0
    staging.close()
    staging.close()
    assert calls == [("lock", memory.data_ptr()), ("unlock", memory.data_ptr())]
    assert checked == [0, 0]


@pytest.mark.gpu
def test_a_gpu_copies_from_it_and_it_can_be_had_again() -> None:
    staging = Staging()
    for value in (3, 5):
        memory = staging.memory
        assert memory.is_pinned()
        memory.fill_(value)
        assert bool((memory.cuda() == value).all())
        staging.close()
        assert not memory.is_pinned()
