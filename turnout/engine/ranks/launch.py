"""Several ranks from one offline command: this process starts them all again as torchrun would, and waits.

Rank 0 has the terminal. What the others write is kept, and shown if one of them fails, which ends all. They
block Ctrl-C, which a terminal sends to the whole group: it ends this process, and they follow, however it
ended (local_launcher.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from turnout.config import LAUNCHER_VARIABLE, Config, Launched
from turnout.engine.engine_plan import resolve
from turnout.engine.ranks.local_launcher import (
    LocalLauncher,
    leave_with_launcher,
    rank_environment,
    require_loopback,
    stop_signals,
)
from turnout.errors import UserError

GRACE = 1.0  # seconds for a rank's failure to be told from those that follow from it
LAST_LINES = 20

Exits = queue.SimpleQueue[tuple[int, int]]  # ranks that ended, and their exit codes


def launch(config: Config, arguments: Sequence[str]) -> int:
    """Run `turnout ARGUMENTS` on the `config.tp_size` ranks of this host; the exit code.

    Raises UserError, before anything is started, for what cannot run.
    """
    if config.nnodes > 1:
        raise UserError(
            f"--nnodes {config.nnodes}: on several hosts, start offline commands with torchrun, once per host"
        )
    resolve(config)
    require_loopback()
    launcher = LocalLauncher("the files of the ranks")
    exits: Exits = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        stack.callback(launcher.remove_folder)
        stack.enter_context(_ended_by_signals())
        stack.enter_context(_started(launcher, config.tp_size, arguments, exits))
        return _wait(exits, config.tp_size, launcher.folder)


def follow(launched: Launched | None) -> None:
    """Let this rank end when the `launch` that started it does; torchrun needs no such help."""
    if launched is not None and launched.lifeline >= 0:
        leave_with_launcher(launched.lifeline, launched.folder)


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
def _started(launcher: LocalLauncher, size: int, arguments: Sequence[str], exits: Exits) -> Iterator[None]:
    """While all ranks run, or have run; none of their processes is left in the end."""
    lifeline, ours = os.pipe()
    # Blocked rather than ignored: ranks inherit either, and one that comes now is held until they are there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for rank in range(size):
            _start(launcher, rank, size, arguments, exits, lifeline)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        launcher.kill()
        launcher.wait()
        os.close(ours)
        os.close(lifeline)


def _start(
    launcher: LocalLauncher, rank: int, size: int, arguments: Sequence[str], exits: Exits, lifeline: int
) -> None:
    folder = launcher.folder
    ours = {"init_method": f"file://{folder / 'join'}", "folder": str(folder), "lifeline": lifeline}
    told = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        LAUNCHER_VARIABLE: json.dumps(ours),
    }
    with contextlib.ExitStack() as stack:
        quiet: IO[bytes] | None = None
        if rank > 0:
            quiet = stack.enter_context(_log(folder, rank).open("wb"))
        launcher.start(
            rank,
            ["-m", "turnout", *arguments],
            lambda rank, code: exits.put((rank, code)),
            environment=rank_environment() | {name: str(value) for name, value in told.items()},
            stdin=subprocess.DEVNULL if quiet else None,
            stdout=quiet,
            stderr=quiet,
            pass_fds=(lifeline,),
        )


def _wait(exits: Exits, size: int, folder: Path) -> int:
    """The exit code of the first rank that fails, once its last words are shown; 0 when all are done."""
    codes: dict[int, int] = {}
    failed = None
    while failed is None:
        if len(codes) == size:
            return 0
        rank, codes[rank] = exits.get()
        failed = rank if codes[rank] else None
    deadline = time.monotonic() + GRACE / 2
    while 0 not in codes and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            rank, codes[rank] = exits.get(timeout=left)
    if codes.get(0):  # it has said why on the terminal
        failed = 0
    code = codes[failed]
    if failed > 0:
        sys.stderr.write(f"rank {failed}:\n{_last_lines(_log(folder, failed))}")
    if code < 0:
        sys.stderr.write(f"error: rank {failed} was killed by {signal.Signals(-code).name}\n")
    return code if code > 0 else 1


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind this process, as SIGINT does, so that it leaves nothing behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in stop_signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _last_lines(path: Path) -> str:
    return "".join(path.read_text(errors="replace").splitlines(keepends=True)[-LAST_LINES:])
