"""Several ranks from one offline command: this process starts them all again as torchrun would, and waits.

Rank 0 has the terminal. What the others write is kept, and shown if one of them fails, which ends all. They
block Ctrl-C, which a terminal sends to the whole group: it ends this process, and they follow, however it
ended, by a pipe that nobody writes to.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from turnout.cache import private_folder
from turnout.config import LAUNCHER_VARIABLE, Config, Launched
from turnout.engine.engine_plan import resolve
from turnout.errors import UserError

POLL_SECONDS = 0.05
GRACE = 1.0  # seconds for a rank's failure to be told from those that follow from it
LAST_LINES = 20


def launch(config: Config, arguments: Sequence[str]) -> int:
    """Run `turnout ARGUMENTS` on the `config.tp_size` ranks of this host; the exit code.

    Raises UserError, before anything is started, for what cannot run.
    """
    if config.nnodes > 1:
        raise UserError(
            f"--nnodes {config.nnodes}: on several hosts, start offline commands with torchrun, once per host"
        )
    resolve(config)
    folder = private_folder("the files of the ranks")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(_ended_by_sigterm())
        ranks = stack.enter_context(_started(config.tp_size, arguments, folder))
        return _wait(ranks, folder)


def follow(launched: Launched | None) -> None:
    """Let this rank end when the `launch` that started it does; torchrun needs no such help."""
    if launched is not None and launched.lifeline >= 0:
        threading.Thread(target=_leave_with_launcher, args=(launched,), daemon=True).start()


@contextlib.contextmanager
def blameless(launched: Launched | None) -> Iterator[None]:
    """Where another rank's end would fail this one: leave it the time to be found first."""
    try:
        yield
    except Exception as error:
        if launched is not None and launched.lifeline >= 0 and not isinstance(error, UserError):
            time.sleep(GRACE)
        raise


@contextlib.contextmanager
def _started(size: int, arguments: Sequence[str], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks' processes, none of which is left in the end."""
    lifeline, ours = os.pipe()
    # Blocked rather than ignored: ranks inherit either, and one that comes now is held until they are there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            ranks.append(_start(rank, size, arguments, folder, lifeline))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield ranks
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()
        os.close(ours)
        os.close(lifeline)


def _start(
    rank: int, size: int, arguments: Sequence[str], folder: Path, lifeline: int
) -> subprocess.Popen[bytes]:
    ours = {"init_method": f"file://{folder / 'join'}", "folder": str(folder), "lifeline": lifeline}
    told = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        LAUNCHER_VARIABLE: json.dumps(ours),
    }
    environment = _loopback() | os.environ | {name: str(value) for name, value in told.items()}
    with contextlib.ExitStack() as stack:
        quiet: IO[bytes] | None = None
        if rank > 0:
            quiet = stack.enter_context(_log(folder, rank).open("wb"))
        return subprocess.Popen(
            [sys.executable, "-m", "turnout.cli", *arguments],
            stdin=subprocess.DEVNULL if quiet else None,
            stdout=quiet,
            stderr=quiet,
            env=environment,
            pass_fds=(lifeline,),
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> int:
    """The exit code of the first rank that fails, once its last words are shown; 0 when all are done."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            break
        if None not in codes:
            return 0
        time.sleep(POLL_SECONDS)
    with contextlib.suppress(subprocess.TimeoutExpired):  # if it failed likewise, it has said so
        if failed > 0 and ranks[0].wait(GRACE / 2):
            failed = 0
    code = ranks[failed].returncode
    if failed > 0:
        sys.stderr.write(f"rank {failed}:\n{_last_lines(_log(folder, failed))}")
    if code < 0:
        sys.stderr.write(f"error: rank {failed} was killed by {signal.Signals(-code).name}\n")
    return code if code > 0 else 1


def _leave_with_launcher(launched: Launched) -> None:
    while os.read(launched.lifeline, 1):
        pass
    shutil.rmtree(launched.folder, ignore_errors=True)
    os._exit(1)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind this process, so that it leaves nothing behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _loopback() -> dict[str, str]:
    """Where gloo is to listen: left alone it takes the host's name, which need not resolve."""
    names = {name for _, name in socket.if_nameindex()}
    return {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in names else {}


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _last_lines(path: Path) -> str:
    return "".join(path.read_text(errors="replace").splitlines(keepends=True)[-LAST_LINES:])
