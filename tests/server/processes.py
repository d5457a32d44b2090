"""Servers of a test's own, their processes and files, and requests that run while something fails."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.serving import tiny_config
from turnout.server.launch import ServerProcess


@contextmanager
def started(folder: Path, **fields: Any) -> Iterator[tuple[ServerProcess, str]]:
    """A server of one's own and its root address."""
    server = ServerProcess(tiny_config(folder, **fields), show=False)
    try:
        yield server, server.wait_ready().removesuffix("/v1")
    finally:
        server.process.kill()
        server.stop()


@contextmanager
def closing_terminals(handler: signal.Handlers) -> Iterator[None]:
    """Processes that start meanwhile meet SIGHUP so, whether or not these tests run under nohup."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def free_port(count: int = 1) -> int:
    """The first of `count` free ports. From those that no system gives to a connection (Linux does from 32768
    on, others from 49152), so that what else runs here does not take them before a server does."""
    draw = random.SystemRandom()
    while True:
        first = draw.randrange(10_000, 32_000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def ranks_of(server: ServerProcess) -> list[psutil.Process]:
    """The rank processes that have not ended, in the order of their start."""
    children = psutil.Process(server.process.pid).children()
    fork_servers = [process for process in children if "turnout.engine.fork_server" in _cmdline(process)]
    ranks = [rank for fork_server in fork_servers for rank in _children(fork_server)]
    return sorted(ranks, key=lambda process: process.create_time())


def http_workers_of(server: ServerProcess) -> list[psutil.Process]:
    """The processes that only serve HTTP and have not ended."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if any("http_workers" in part for part in _cmdline(child))]


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children()
    return []


def _cmdline(process: psutil.Process) -> list[str]:
    """Empty for one that has ended, perhaps just now, whether or not its parent knows."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def folder_of(server: ServerProcess) -> Path:
    """The folder that the server shares with its ranks."""
    listening = psutil.Process(server.process.pid).net_connections("unix")
    (folder,) = {Path(c.laddr).parent for c in listening if "turnout-" in c.laddr}
    return folder


def has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def eventually(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def is_ready(root: str) -> bool:
    return httpx.get(f"{root}/ready", timeout=60).status_code == 200


def refusal(root: str, seconds: float) -> httpx.Response:
    """The first answer of /ready, asked again and again, that is not 200."""
    answers: list[httpx.Response] = []
    with httpx.Client(timeout=60) as http:  # one: to make it takes long where others compute

        def refused() -> bool:
            answers.append(http.get(f"{root}/ready"))
            return answers[-1].status_code != 200

        assert eventually(refused, seconds)
    return answers[-1]


def await_reports(root: str, ranks: int = 1) -> None:
    """Until ranks that compute nothing have said all that they count: experts once a second, and perhaps only
    the second time."""
    seen, last = 0, 0.0

    def all_have_come() -> bool:
        nonlocal seen, last
        now = httpx.get(f"{root}/server_info", timeout=60).json()["seconds_since_report"]
        seen, last = seen + (now < last), now
        return seen >= 2 * ranks

    assert eventually(all_have_come)


class Background(threading.Thread):
    """A streamed request, running when this returns; keeps its data lines, also if the stream breaks."""

    def __init__(self, root: str, tokens: int, n: int = 1, prompt: str = "go on", **fields: Any):
        super().__init__(daemon=True)
        self.url = f"{root}/v1/completions"
        self.body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "n": n,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,  # says which tokens an event holds
        } | fields
        self.lines: list[str] = []
        self.running = threading.Event()
        self.ended = 0.0  # time.monotonic()
        self.start()
        assert self.running.wait(60)

    def run(self) -> None:
        with (
            suppress(httpx.RemoteProtocolError, httpx.ReadError),
            httpx.stream("POST", self.url, json=self.body, timeout=120) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    self.lines.append(line.removeprefix("data: "))
                    self.running.set()
        self.ended = time.monotonic()

    def result(self) -> list[str]:
        self.join(120)
        return self.lines

    def num_tokens(self) -> int:
        """Of all choices, in a stream that ended as it should."""
        *events, done = self.result()
        assert done == "[DONE]", done
        return sum(
            len(choice["logprobs"]["tokens"]) for event in events for choice in json.loads(event)["choices"]
        )

    def error(self) -> dict[str, Any]:
        """The error that ended the stream, which must be its last event."""
        last = json.loads(self.result()[-1])
        assert "error" in last, last
        return last["error"]
