"""`turnout` and `python -m turnout`: the command line, which Ctrl-C ends without a traceback."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, _interrupt)
    from turnout.cli import main as run

    try:
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


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
