"""A server of the scripted model, which reasons and calls tools."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scripted import write_scripted
from tests.server.processes import started


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its root address."""
    folder = tmp_path_factory.mktemp("scripted")
    write_scripted(folder)
    with started(folder, served_model_name="scripted", reasoning_parser="auto") as (_, root):
        yield root
