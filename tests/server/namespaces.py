"""Network namespaces as hosts: each has its own addresses and ports, and reaches others by a cable only.

A namespace belongs to a thread, and to the processes that this starts, and vanishes with them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

CLONE_NEWNET = 0x40000000
P = ParamSpec("P")
T = TypeVar("T")


class Namespace:
    """A host without any interface but its loopback."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.thread_id = self.call(_enter_new_namespace)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function`, run on this host; what it starts stays there."""
        return self._thread.submit(function, *args, **kwargs).result()

    def ip(self, *words: str) -> None:
        self.call(subprocess.run, ["ip", *words], check=True)

    def close(self) -> None:
        self._thread.shutdown()


def connect(one: Namespace, other: Namespace) -> tuple[str, str]:
    """Lay a cable between two hosts; their addresses."""
    one.ip("link", "add", "cable", "type", "veth", "peer", "cable", "netns", str(other.thread_id))
    addresses = "10.77.0.1", "10.77.0.2"
    for host, address in zip((one, other), addresses, strict=True):
        host.ip("address", "add", f"{address}/24", "dev", "cable")
        host.ip("link", "set", "cable", "up")
    return addresses


def _enter_new_namespace() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return threading.get_native_id()
