"""Rank processes as copies of one process that has imported what they need, which takes seconds otherwise.

A fork server is single-threaded, computes nothing and opens no device, so that copies of it are as good as
processes of their own; they share the memory of what was imported. For each rank it gets a message with two
descriptors: the rank's standard input, and a pipe on which it tells the rank's process id and, once that has
ended, how. It also keeps the memory in which ranks leave prepared weights for the next ones
(models/shared_weights.py), and starts the keepers of those on GPUs (models/weight_keeper.py). A spare is a
copy that has opened its GPU already and waits to become the next rank there. The fork server ends when its
starter does, keepers and spares with it, and a rank by its standard input. Torch-free until it runs.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

import psutil

from turnout.cache import place_temporary_files
from turnout.engine import worker
from turnout.engine.ranks.local_launcher import (
    describe_exit,
    leave_signals_to_launcher,
    resume_when_parent_ends,
    signals_held,
)
from turnout.moe.capabilities import declared
from turnout.registry import ARCHITECTURES

# A message: whether to forget the weights that earlier ranks prepared; the rank's keeper, -1: none; and
# whether it asks for a spare instead of a rank.
MESSAGE = struct.Struct("<?i?")
NUMBER = 8  # bytes of a process id or exit code on a pipe
IMPORTED = (
    "rich.progress",
    "torch.distributed",
    "turnout.engine.builder",
    "turnout.engine.engine_plan",
    "turnout.engine.ranks.rendezvous",
    "turnout.models.decoder",
    "turnout.moe.backends.local.dispatcher",
)
IMPORTED_ON_GPU = (
    "torch.distributed._symmetric_memory",
    "turnout.attention.backends.triton.paged",
    "turnout.moe.backends.hopper.runner",
    "turnout.moe.backends.nvlink.dispatcher",
    "turnout.moe.backends.nvlink.warmup",
)
KERNELS = ("attention", "common", "hopper", "nvlink")  # packages of GPU kernels
IMPORTED_ON_CPU = (
    "turnout.kernels.cpu.attention",
    "turnout.kernels.cpu.route",
    "turnout.kernels.cpu.rows",
    "turnout.moe.backends.cpu.runner",
)


class ForkedProcess:
    """A rank process, used like a subprocess.Popen. pid: None until it runs. stdin: its standard input."""

    def __init__(self, server: subprocess.Popen[bytes], stdin: int, status: int):
        """stdin: where to write. status: where the fork server tells of it. Both are closed here."""
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.pid: int | None = None
        self._server, self._status = server, status
        self._process: psutil.Process | None = None
        self._killed = False
        self._lock = threading.Lock()

    def kill(self) -> None:
        """End it at once; if it does not run yet, the fork server too, which is importing."""
        with self._lock:
            self._killed = True
            if self.pid is None:
                self._server.kill()
            self._kill()

    def wait(self) -> int:
        """The exit code once it has ended, negative: of the signal that did it. To be called once."""
        with os.fdopen(self._status, "rb", buffering=0) as status:
            pid = status.read(NUMBER)
            if not pid:  # the fork server failed, or was killed
                return self._server.wait()
            with self._lock:
                self.pid = int.from_bytes(pid, "little")
                with suppress(psutil.NoSuchProcess):
                    self._process = psutil.Process(self.pid)
                if self._killed:
                    self._kill()
            if code := status.read(NUMBER):
                return int.from_bytes(code, "little", signed=True)
        with self._lock:  # without the fork server there is no one to tell how it ends: it ends now
            self._kill()
        if self._process is not None:
            self._process.wait()
        return -signal.SIGKILL

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.kill()


class ForkServer:
    """The starter's side; starts a server process when one is needed, and another one if that has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._commands: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._weights = ""

    def fork(
        self, environment: Mapping[str, str], weights: str = "", keeper: int | None = None
    ) -> ForkedProcess:
        """A rank process (worker.py) with these environment variables and our standard error.

        weights: a stamp of the checkpoint; if it has changed, what was prepared before is forgotten.
        keeper: number of the rank's GPU, where a process is to keep its weights."""
        self.prepare(environment)
        assert self._process is not None
        assert self._commands is not None
        stdin, ours = os.pipe()
        status, theirs = os.pipe()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended meanwhile, as `wait` finds
            message = MESSAGE.pack(weights != self._weights, -1 if keeper is None else keeper, False)
            socket.send_fds(self._commands, [message], [stdin, theirs])
        self._weights = weights
        os.close(stdin)
        os.close(theirs)
        return ForkedProcess(self._process, ours, status)

    def make_spare(self, keeper: int) -> None:
        """Have a process that has opened GPU number `keeper` wait to become the next rank with that keeper. A
        server process must run; nothing happens if there is a spare already."""
        assert self._commands is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # as above
            self._commands.send(MESSAGE.pack(False, keeper, True))

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Start a server process with this environment unless one runs, so that it imports meanwhile."""
        if self._process is None or self._process.poll() is not None or self._environment != environment:
            self.close()
            self._start(dict(environment))

    def close(self) -> None:
        """End the server process; ranks go on."""
        if self._commands is not None:
            self._commands.close()
            self._commands = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._commands, theirs = socket.socketpair()
        with theirs, signals_held():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "turnout.engine.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                env=environment,
                pass_fds=[theirs.fileno()],
            )


def main(commands: socket.socket) -> NoReturn:
    """Import, and then fork as told, until `commands` ends."""
    resume_when_parent_ends()
    leave_signals_to_launcher()
    place_temporary_files()
    copies = Copies(commands, can_fork=_import_all())
    signal.signal(signal.SIGCHLD, lambda number, frame: copies.reap())
    while True:
        message, descriptors, _, _ = socket.recv_fds(commands, MESSAGE.size, 2)
        if not message:
            os._exit(0)
        forget, number, spare = MESSAGE.unpack(message)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until what is made is noted
        if spare:
            copies.make_spare(number)
        else:
            stdin, status = descriptors
            copies.make_rank(stdin, status, forget, number)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class Spare:
    """orders: where it waits for what a rank needs."""

    pid: int
    orders: socket.socket

    def become_rank(self, *descriptors: int) -> bool:
        """descriptors: its standard input, the weights' memory and its keeper's door. False if it has ended
        meanwhile."""
        try:
            socket.send_fds(self.orders, [b"rank"], descriptors)
        except OSError:
            return False
        finally:
            self.orders.close()
        return True


class Copies:
    """Of this process, that were made so far. SIGCHLD is blocked while one is made."""

    def __init__(self, commands: socket.socket, *, can_fork: bool):
        """can_fork: whether copies can be ranks, keepers and spares; otherwise ranks start from nothing."""
        self._commands, self._can_fork = commands, can_fork
        self._weights = -1
        self._running: dict[int, int] = {}  # process id: its status pipe
        self._doors: dict[int, Connection] = {}  # of keepers, by number
        self._keepers: dict[int, int] = {}  # process id: number
        self._spares: dict[int, Spare] = {}  # by number

    def make_rank(self, stdin: int, status: int, forget: bool, number: int) -> None:
        """stdin, status: descriptors for it, and to tell of it. forget, number: see MESSAGE."""
        if self._can_fork and (forget or self._weights < 0):
            if self._weights >= 0:
                os.close(self._weights)
            self._weights = os.memfd_create("turnout-weights")
        if self._can_fork and number >= 0 and number not in self._doors:
            self._make_keeper(number, stdin, status)
        own = self._doors.get(number)
        door = own.fileno() if own else -1
        spare = self._spares.pop(number, None)
        if spare and spare.become_rank(stdin, self._weights, door):
            pid = spare.pid
        elif (pid := os.fork()) == 0:
            self._leave(status, keeping=own)
            _become_rank(stdin, self._can_fork, self._weights, door)
        self._running[pid] = status
        os.close(stdin)
        _tell(status, pid)

    def make_spare(self, number: int) -> None:
        """Unless there is one."""
        if not self._can_fork or number in self._spares:
            return
        orders, inside = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self._leave(orders.detach(), self._weights)
            _become_spare(number, inside)
        inside.close()
        self._spares[number] = Spare(pid, orders)

    def _make_keeper(self, number: int, *also: int) -> None:
        """also: descriptors that are none of its business."""
        self._doors[number], inside = Pipe()
        pid = os.fork()
        if pid == 0:
            self._leave(self._weights, *also)
            _become_keeper(inside)
        inside.close()
        self._keepers[pid] = number

    def _leave(self, *also: int, keeping: Connection | None = None) -> None:
        """In a copy: close what is not its own, `also` such descriptors, but for one door."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        doors = [door.fileno() for door in self._doors.values() if door is not keeping]
        sockets = [self._commands, *(spare.orders for spare in self._spares.values())]
        for descriptor in (*(one.detach() for one in sockets), *self._running.values(), *doors, *also):
            if descriptor >= 0:
                os.close(descriptor)

    def reap(self) -> None:
        """Forget what has ended, and tell of ranks."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # the call that this one interrupts has found it, and tells
                return
            if pid == 0:
                return
            how = os.waitstatus_to_exitcode(status)
            if pid in self._running:
                _tell(self._running[pid], how)
                os.close(self._running.pop(pid))
            elif pid in self._keepers:
                number = self._keepers.pop(pid)
                self._doors.pop(number).close()
                os.write(
                    2,
                    f"the keeper of the weights on GPU {number} {describe_exit(how)}; ranks go on, and "
                    "those that start next read them again\n".encode(),
                )
            else:
                for number in [number for number, spare in self._spares.items() if spare.pid == pid]:
                    self._spares.pop(number).orders.close()


def _import_all() -> bool:
    """Import what ranks need. Whether copies of this process can be ranks."""
    if sys.platform != "linux":  # elsewhere system libraries do not survive being copied
        return False
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    for module in IMPORTED if has_gpu else IMPORTED + IMPORTED_ON_CPU:
        importlib.import_module(module)
    if has_gpu:
        import_for_gpus()
    declared.RUNNERS.values(), declared.DISPATCHERS.values()  # imports the declarations
    for architecture in ARCHITECTURES:
        ARCHITECTURES.get(architecture)
    can_fork = not _driver_is_open()
    gc.collect()
    gc.freeze()  # a collection in a copy would write to the memory that all share
    return can_fork


def import_for_gpus() -> None:
    """Import what ranks on GPUs need and read what Triton reads once: over a second of each of them.

    What cannot be imported stays with the ranks, which may not need it, or say what is wrong."""
    try:
        from turnout.kernels.common.compilation import hash_compiler

        hash_compiler()
        for module in IMPORTED_ON_GPU:
            importlib.import_module(module)
        for package in (importlib.import_module(f"turnout.kernels.{name}") for name in KERNELS):
            for found in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{found.name}")
    except ImportError:  # without Triton, of which the plan tells
        return
    except Exception as error:
        print(f"ranks import GPU kernels themselves: {type(error).__name__}: {error}", file=sys.stderr)


def _become_keeper(door: Connection) -> NoReturn:
    from turnout.models import weight_keeper

    resume_when_parent_ends()
    Path("/proc/self/comm").write_text("turnout keeper")
    try:
        weight_keeper.run(door)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _become_spare(number: int, orders: socket.socket) -> NoReturn:
    resume_when_parent_ends()
    Path("/proc/self/comm").write_text("turnout spare")
    try:
        _open_gpu(number)
        message, descriptors, _, _ = socket.recv_fds(orders, NUMBER, 3)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if not message:
        os._exit(0)
    Path("/proc/self/comm").write_text("turnout rank")
    orders.close()
    stdin, weights, door = descriptors
    _become_rank(stdin, True, weights, door, spare=True)


def _open_gpu(number: int) -> None:
    """As torch numbers them, and its library of products; nothing where there is none of that number."""
    import torch

    if number < torch.cuda.device_count():
        torch.cuda.set_device(number)
        x = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        x @ x
        torch.cuda.synchronize()
        del x
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()  # what it waits with is another rank's memory


def _become_rank(stdin: int, can_fork: bool, weights: int, door: int, spare: bool = False) -> NoReturn:
    """door: of its keeper, -1 if it has none."""
    os.dup2(stdin, 0)
    os.close(stdin)
    if not can_fork:
        os.execv(sys.executable, [sys.executable, "-m", "turnout.engine.worker"])
    worker.main_and_exit(weights, door, spare)


def _tell(status: int, number: int) -> None:
    with suppress(BrokenPipeError):
        os.write(status, number.to_bytes(NUMBER, "little", signed=True))


def _driver_is_open() -> bool:
    """Whether an import has opened NVIDIA's driver, which does not work in copies of this process."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(descriptor.readlink()).startswith("/dev/nvidia"):
                return True
    return False


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
