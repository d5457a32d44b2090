"""Kept for the whole session: a real server on a tiny random model, started as a user starts it; ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import Pools
from tests.serving import tiny_config
from tests.tiny import write_model
from turnout.server.launch import ServerProcess


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def base_url(tiny_folder: Path) -> Iterator[str]:
    """The address of the shared server, ending in /v1."""
    server = ServerProcess(tiny_config(tiny_folder), show=False)
    try:
        yield server.wait_ready()
    finally:
        assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Pools of processes by number of ranks, started when first used."""
    pools = Pools()
    try:
        yield pools
    finally:
        pools.close()
