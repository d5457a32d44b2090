"""The process of a worker by itself, started as the head starts it."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from turnout.config import ServerConfig
from turnout.server.http_workers.pool import MODULE


@pytest.mark.parametrize("written", [0, 20], ids=["nothing", "a-part"])
def test_a_head_that_ends_before_it_gave_the_configuration_leaves_nothing(tmp_path: Path, written: int):
    folder = tmp_path / "turnout_http_"
    folder.mkdir()
    (folder / "http").touch()
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, *(str(one.fileno()) for one in theirs), str(folder / "http")],
        pass_fds=[one.fileno() for one in theirs], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=False,
    )  # fmt: skip
    for one in (*ours, *theirs):
        one.close()
    _, errors = process.communicate(pickle.dumps(ServerConfig(model="demo"))[:written], timeout=60)
    assert (process.returncode, errors) == (1, b"")
    assert not folder.exists()
