"""Processes of ranks as the system sees them: their ends are told, and none outlives its launcher."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from turnout.engine.ranks.local_launcher import (
    LocalLauncher,
    describe_exit,
    interface_of,
    local_address,
    rank_environment,
)

SECONDS = 20.0


def gone(pid: int) -> bool:
    """Whether the process ends within SECONDS."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def test_the_end_of_each_process_is_told_with_its_code():
    launcher = LocalLauncher("a test")
    exits: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    try:
        for rank, body in enumerate(("pass", "raise SystemExit(3)", "import time; time.sleep(60)")):
            launcher.start(
                rank, ["-c", body], lambda rank, code: exits.put((rank, code)), environment=os.environ
            )
        early = dict(exits.get(timeout=SECONDS) for _ in range(2))
        assert early == {0: 0, 1: 3}
        launcher.kill()
        assert exits.get(timeout=SECONDS) == (2, -signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.remove_folder()
    assert not launcher.folder.exists()
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL; it may have run out of memory"


def test_a_rank_leaves_and_cleans_up_when_its_launcher_is_killed(tmp_path: Path):
    """The launcher is killed outright, so that only the end of the lifeline tells the rank."""
    folder = tmp_path / "shared"
    folder.mkdir()
    rank = (
        "import sys, time\n"
        "from turnout.engine.ranks.local_launcher import leave_with_launcher\n"
        "leave_with_launcher(0, sys.argv[1])\n"
        "print('follows', flush=True)\n"
        "time.sleep(60)\n"
    )
    launcher = (
        "import subprocess, sys, time\n"
        f"rank = subprocess.Popen([sys.executable, '-c', {rank!r}, {str(folder)!r}], stdin=subprocess.PIPE)\n"
        "print(rank.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        pid = int(lines.readline())
        assert lines.readline() == "follows\n"
        process.kill()
        process.wait()
        assert gone(pid)
    assert not folder.exists()


def test_interfaces_are_those_that_the_system_lists():
    names = {name for _, name in socket.if_nameindex()}
    loopback = interface_of("127.0.0.1")
    assert loopback in names
    assert local_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("203.0.113.77") == ""  # an address for documentation, which no host has


def test_a_named_interface_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert rank_environment()["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
    assert "NCCL_SOCKET_IFNAME" not in {k for k in rank_environment() if k not in os.environ}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen0")
    assert rank_environment()["GLOO_SOCKET_IFNAME"] == "chosen0"


def test_ranks_do_not_look_for_each_other_in_the_store_of_torchrun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not [name for name in rank_environment() if name.startswith("TORCHELASTIC")]


def test_openmp_sleeps_while_it_waits_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert rank_environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert rank_environment()["OMP_WAIT_POLICY"] == "ACTIVE"
