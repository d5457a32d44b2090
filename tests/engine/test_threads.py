"""Usable cores from affinity, hyperthread siblings and control-group quotas, on a made-up machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.engine.toy import make_core
from turnout.engine import threads
from turnout.engine.threads import usable_cores
from turnout.kernels.cpu import threads as kernels


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores with two hyperthreads each: CPU i and i + 4 share one."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


def test_hyperthreads_count_once(machine: Path) -> None:
    assert usable_cores(cpus=machine, cgroup=machine) == 4


def test_affinity_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5})
    assert usable_cores(cpus=machine, cgroup=machine) == 2


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1)])
def test_quota_of_cgroup_v2(machine: Path, quota: str, cores: int) -> None:
    (machine / "cpu.max").write_text(quota + "\n")
    assert usable_cores(cpus=machine, cgroup=machine) == cores


def test_quota_of_cgroup_v1(machine: Path) -> None:
    (machine / "cpu").mkdir()
    (machine / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    (machine / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(cpus=machine, cgroup=machine) == 3


def test_a_machine_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert usable_cores(cpus=tmp_path, cgroup=tmp_path) == 3


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (8, 7)])
def test_one_core_is_left_to_others(monkeypatch: pytest.MonkeyPatch, cores: int, expected: int) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    assert threads.default_threads() == expected


def test_the_engine_computes_with_as_many_as_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        make_core(num_threads=2)
        assert torch.get_num_threads() == 2
        assert kernels.threads_for(1e9) == 2
        assert make_core(num_threads=0).info()["num_threads"] == kernels.threads_for(1e9) <= usable_cores()
        assert torch.get_num_threads() <= max(1, usable_cores() - 1)
    finally:
        torch.set_num_threads(before)
        kernels.use_threads(0)


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"), [(8, 1, 7), (8, 2, 3), (8, 4, 1), (2, 4, 1), (64, 8, 7)]
)
def test_ranks_share_the_cores_of_their_host(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, expected: int
):
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    assert threads.default_threads(ranks) == expected


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(1, 1, 1), (2, 1, 2), (8, 3, 2), (2, 4, 1)])
def test_kernels_take_all_cores(monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, expected: int):
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    assert threads.kernel_threads(ranks) == expected
