"""`turnout` and `python -m turnout`: the command line, which ends without a traceback where it is interrupted
or what it writes finds no room."""

from __future__ import annotations

import errno
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
FAILED = 2  # as of user errors
STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}  # in the order of their descriptors
CANNOT_BE_WRITTEN = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO


def main() -> None:
    _open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, _interrupt)
    from turnout.cli import main as run

    try:
        try:
            run()
        finally:
            sys.stdout.flush()  # not when Python ends, which would report a failure as ignored
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read has enough
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in CANNOT_BE_WRITTEN:
            raise
        sys.stderr.write(f"error: {error.filename or 'the output'} cannot be written ({error.strerror})\n")
        _drop_output()
        sys.exit(FAILED)


def _open_closed_streams() -> None:
    """Have the null device for standard streams that are closed, so that no file gets their number."""
    for name, mode in STREAMS.items():
        if getattr(sys, name) is None:  # the system gives the lowest number that is free
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _drop_output() -> None:
    """What Python still holds for standard output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; while a module is imported, end the process.

    What is raised inside an import may be swallowed by a module that tries what there is, or come out as
    another error.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
