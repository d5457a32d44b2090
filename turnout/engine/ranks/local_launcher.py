"""Starts the rank processes of this host, for the server and for offline commands, and leaves nothing behind.

A launcher has a private folder for the files that its ranks share. Each rank holds a descriptor, its
lifeline, which reaches its end when the launcher does, however that died: the rank then removes the folder
and leaves too (`leave_with_launcher`). Torch-free.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Protocol

import psutil

from turnout.cache import private_folder
from turnout.errors import UserError

PR_SET_PDEATHSIG = 1  # linux/prctl.h: the signal that a process gets when the thread that started it ends

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last when a terminal closes

OnExit = Callable[[int, int], None]  # rank, exit code (negative: of the signal that ended it)


class RankProcess(Protocol):
    """What is needed of a subprocess.Popen. pid: None if it is not known yet."""

    @property
    def pid(self) -> int | None: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class LocalLauncher:
    """The processes of some ranks. Not thread-safe."""

    def __init__(self, purpose: str):
        """purpose: of the folder, for the error where none can be made. Raises UserError."""
        self.folder = private_folder(purpose)
        self.processes: dict[int, RankProcess] = {}

    def start(
        self,
        rank: int,
        arguments: Sequence[str],
        on_exit: OnExit,
        *,
        environment: Mapping[str, str],
        stdin: int | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Run `python ARGUMENTS` as `rank`. A thread calls on_exit once the process has ended."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            bufsize=0,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=dict(environment),
            pass_fds=pass_fds,
        )
        self.watch(rank, process, on_exit)
        return process

    def watch(self, rank: int, process: RankProcess, on_exit: OnExit) -> None:
        """`process` is `rank`, see `start`."""
        self.processes[rank] = process
        with signals_held():  # the main thread gets them: else it may learn of an end before a signal
            threading.Thread(target=lambda: on_exit(rank, process.wait()), daemon=True).start()

    def kill(self) -> None:
        """End all processes at once; `wait` for them to be gone."""
        for process in self.processes.values():
            process.kill()

    def wait(self) -> None:
        for process in self.processes.values():
            process.wait()

    def hang_up(self) -> None:
        """Close this end of the processes' standard input, which is the end of those that are still there."""
        for process in self.processes.values():
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def leave_with_launcher(lifeline: int, folder: str) -> None:
    """In a rank: from now on, end this process at once when its launcher has, whatever it is doing, and even
    if it is stopped.

    lifeline: a descriptor on which nothing comes before its end. folder: the launcher's, removed then.
    """

    resume_when_parent_ends()

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def stop_signals() -> list[signal.Signals]:
    """For whoever starts ranks to handle: all of STOP_SIGNALS but for SIGHUP where nohup has it ignored."""
    return [s for s in STOP_SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]


@contextmanager
def signals_held() -> Iterator[None]:
    """While a process or thread is started that leaves STOP_SIGNALS to this one: it inherits that.

    Tasks of one thread may start several at once: the last one to end lets signals come again.
    """
    if not _held.depth:
        _held.before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _held.depth += 1
    try:
        yield
    finally:
        _held.depth -= 1
        if not _held.depth:
            signal.pthread_sigmask(signal.SIG_SETMASK, _held.before)


class _Held(threading.local):
    """Of this thread: how many hold its signals, and what it had blocked before."""

    depth = 0
    before: set[int | signal.Signals] = set()


_held = _Held()


def leave_signals_to_launcher() -> None:
    """A terminal sends SIGINT and SIGHUP to all processes of a command; the one that starts ranks decides."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def resume_when_parent_ends() -> None:
    """Let this process run on, if it is stopped, when its parent ends: it would not see that otherwise."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def rank_environment(towards: str = "127.0.0.1") -> dict[str, str]:
    """This process's environment for a rank: what is chosen here gives way to what it names already.

    Gloo (and NCCL, between hosts) is bound to the network interface through which `towards` is reached: by
    default gloo binds to whatever the host's name resolves to, which others may not reach, if it resolves.
    OpenMP's threads, torch's, sleep while they wait for work: spinning, they keep the cores from whoever they
    wait for. With two threads on two busy cores the same work took 17.3 s, and 1.15 s with this.
    What torchrun tells its own processes (TORCHELASTIC_*) is left out: with it, ranks that it did not start
    would look for each other in its store.
    """
    address = local_address(towards)
    interface = interface_of(address)
    chosen = {"OMP_WAIT_POLICY": "PASSIVE"}
    if interface:
        chosen["GLOO_SOCKET_IFNAME"] = interface
    if interface and not address.startswith("127."):
        chosen["NCCL_SOCKET_IFNAME"] = interface
    return chosen | {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}


def require_loopback() -> None:
    """Raises UserError where ranks of this host could not meet, as in a new network namespace."""
    state = psutil.net_if_stats().get(interface_of("127.0.0.1"))
    if "GLOO_SOCKET_IFNAME" not in os.environ and (state is None or not state.isup):
        raise UserError(
            "the ranks of a host meet at 127.0.0.1, and its loopback interface is down; bring it up "
            "(`ip link set lo up`)"
        )


def local_address(towards: str) -> str:
    """This host's address on connections to `towards`; empty if there is no way there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # sends nothing
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The network interface with this IPv4 address; empty if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == address for one in addresses):
            return name
    return ""


def describe_exit(code: int) -> str:
    """An exit code of a process, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = "; it may have run out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
