"""How many CPU threads to compute with: the physical cores this process may really use, but for one, shared
among the ranks of this host. Kernels of our own take that one too.

The one is for the server, its clients and whatever else runs. Threads wait at a barrier after every
operation, so all wait for the one whose core another process took. Measured on 2 cores (demo model, tokens
per second at 1 and 32 streams): on a busy machine 277 and 1693 with 1 thread; with 2 less than a tenth of
that where OpenMP's threads spin, 57 and 714 where they sleep, as those of ranks do (rank_environment in
ranks/local_launcher.py); on a quiet one 258 and 1893 with 1, 268 and 1977 with 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")
# What a GPU leaves to its host is small: 63 threads that share 100 kB took 1.6 ms, one takes 10 us.
WITH_GPU = 4


def default_threads(ranks: int = 1, *, with_gpu: bool = False) -> int:
    """For each of `ranks` processes on this host: their share of the cores; with a GPU, few of them."""
    share = max(1, (usable_cores() - 1) // ranks)
    return min(share, WITH_GPU) if with_gpu else share


def kernel_threads(ranks: int = 1) -> int:
    """For the kernels of each of `ranks` processes on this host, whose threads wait for none that is late
    (kernels/cpu/team.py): their share of all cores."""
    return max(1, usable_cores() // ranks)


def usable_cores(*, cpus: Path = CPUS, cgroup: Path = CGROUP) -> int:
    """Physical cores among the CPUs of this process's affinity mask, within its control group's quota.

    Two hyperthreads of a core share its multipliers, so that a thread on each only adds waiting.
    """
    if not hasattr(os, "sched_getaffinity"):  # no affinity on this platform
        return max(1, os.cpu_count() or 1)
    allowed = os.sched_getaffinity(0)
    cores = len({_siblings(cpus, cpu) for cpu in allowed})
    return max(1, min([cores, *_quotas(cgroup)]))


def _siblings(cpus: Path, cpu: int) -> str:
    """The hyperthreads of the core of `cpu`, as the kernel lists them; `cpu` alone if it does not say."""
    try:
        return (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quotas(cgroup: Path) -> Iterable[int]:
    """Whole CPUs that the control group's quota grants: version 2's file, then version 1's pair."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) // int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            yield quota_us // int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        pass
