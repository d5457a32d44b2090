"""Start a server as a user would, for a while: `with launch(config) as base_url: ...`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import IO

from turnout.config import LAUNCHER_VARIABLE, Config, ServerConfig
from turnout.errors import UserError
from turnout.flags import flag_name
from turnout.server.run import READY

LAST_LINES = 20
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextlib.contextmanager
def launch(config: Config, *, show: bool = True, own_group: bool = False) -> Iterator[str]:
    """Run `turnout serve` with `config` in a process of its own; yields its base URL, ending in /v1.

    A plain `Config`, or port 0, gets any free port. `show` passes the server's output on to standard
    error, progress bars included. own_group: keys such as Ctrl-C in our terminal are not for the server.
    Raises UserError if the server does not start, with its last lines unless they were shown. On leaving, the
    server is told to drain and has its --shutdown-timeout for that; so it does if this process is killed.
    """
    if not isinstance(config, ServerConfig):
        config = ServerConfig(**config.describe(), port=0)
    server = ServerProcess(config, show=show, own_group=own_group)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


class ServerProcess:
    """A running `turnout serve`, its output watched by a thread."""

    def __init__(self, config: ServerConfig, *, show: bool = True, own_group: bool = False):
        self.config = config
        self.base_url: str | None = None
        self._show = show
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._known = threading.Event()  # ready or ended
        self.process = subprocess.Popen(
            [sys.executable, "-m", "turnout", "serve", config.model, *arguments(config)],
            stdin=subprocess.PIPE,  # nothing comes from it but its end, however this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(config) | {LAUNCHER_VARIABLE: json.dumps({"lifeline": 0})},
            bufsize=0,
            process_group=0 if own_group else None,
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def wait_ready(self) -> str:
        """The base URL once requests are served. Raises UserError if the server ends or takes too long."""
        self._known.wait(self.config.startup_timeout + 60)
        if self.base_url is None:
            self.stop()
            said = "; it says why above" if self._show else f":\n{self.last_lines()}"
            raise UserError(f"the server did not start (exit code {self.process.returncode}){said}")
        return self.base_url

    def last_lines(self) -> str:
        return "\n".join(self._lines)

    def stop(self) -> int:
        """Tell the server to drain, wait for it; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(self.config.shutdown_timeout + 15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=5)
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.returncode

    def _read(self, pipe: IO[bytes]) -> None:
        rest = b""
        while chunk := pipe.read(4096):
            if self._show:
                sys.stderr.buffer.write(chunk)
                sys.stderr.flush()
            *lines, rest = re.split(rb"[\r\n]", rest + chunk)
            for line in lines:
                self._note(line)
        self._note(rest)
        self._known.set()

    def _note(self, raw: bytes) -> None:
        line = _CONTROL.sub("", raw.decode(errors="replace")).rstrip()
        if line:
            self._lines.append(line)
        if (url := announced(line)) is not None:
            self.base_url = url
            self._known.set()


def announced(line: str) -> str | None:
    """The base URL, if this line of a server's output announces it; perhaps after the start of a line that
    another thread of the server has not ended yet, as those do that pass on what Ray's processes print."""
    _, ready, url = line.partition(READY)
    return url if ready else None


def arguments(config: ServerConfig) -> list[str]:
    """Every field as a flag, so that neither the environment nor new defaults change what was asked."""
    words = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("model", "api_key") or value is None:
            continue
        if isinstance(value, bool):
            words.append(flag_name(field.name) if value else "--no-" + flag_name(field.name)[2:])
        else:
            words += [flag_name(field.name), str(value)]
    return words


def environment(config: ServerConfig) -> dict[str, str]:
    """Ours, plus what must not show in a process list, plus our terminal's nature behind the pipe."""
    values = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    values.pop("TURNOUT_API_KEY", None)  # `config` holds the one that counts
    if config.api_key is not None:
        values["TURNOUT_API_KEY"] = config.api_key
    if sys.stderr.isatty():
        values["TTY_COMPATIBLE"] = "1"
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
        if columns > 0:  # some terminals do not know
            values["COLUMNS"] = str(columns)
    return values
