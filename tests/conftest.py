"""Kept for the whole session: a real server on a tiny random model, started as a user starts it; ranks.

Under xdist each worker that runs tests for one GPU (-m gpu) gets one of those there are, in turn.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.evidence import pytest_runtest_setup as pytest_runtest_setup

if TYPE_CHECKING:  # with torch, which the process of xdist that only starts workers does not need
    from tests.ranks import Pools

LONGEST = (  # files that took 40 s and more of `make test-more` or `make test`, or 15 s late; longest first
    "server/supervise/test_ray_ranks.py",
    "server/supervise/test_replay.py",
    "server/supervise/test_hosts_lost.py",
    "server/test_lifecycle.py",
    "server/supervise/test_dial_in.py",
    "server/supervise/test_local_ranks.py",
    "server/test_routers.py",
    "engine/test_llm_ranks.py",
    "tools/test_chaos_streams.py",
    "server/api/test_openapi.py",
    "kernels/attention/test_compressed_attention.py",
    "server/supervise/test_weight_keeper.py",
    "test_cli.py",
    "test_cache.py",
    "tools/test_random_checkpoint.py",
    "tools/test_train_demo.py",
)


def pytest_configure(config: pytest.Config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER")  # gw0, gw1, ...
    if worker is not None and config.getoption("markexpr") == "gpu":
        drivers = sorted(Path("/dev").glob("nvidia[0-9]*"), key=lambda f: int(f.name[6:]))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(f.name[6:] for f in drivers))
        os.environ["CUDA_VISIBLE_DEVICES"] = one_of(visible, int(worker[2:]))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Modules and tests stay: to look through their million objects again and again took a tenth of the time
    of collecting them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # of the tests that were selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, those with tests that have more than the usual time before all: at
    the end of a run the other workers would wait for them."""
    longest: dict[Path, float] = {}
    for item in items:
        if mark := item.get_closest_marker("timeout"):
            longest[item.path] = max(longest.get(item.path, 0), *mark.args)
    places = {Path(__file__).parent / file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: (-longest.get(item.path, 0), places.get(item.path, len(places))))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under TURNOUT_TESTS_MUST_RUN=1, as CI sets it, a skipped test fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("TURNOUT_TESTS_MUST_RUN") != "1":  # or a worker of xdist
        return
    skipped = [report.nodeid for report in reporter.stats.get("skipped", [])]
    if skipped and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line(f"skipped, though all tests must run: {', '.join(skipped)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def one_of(visible: str, worker: int) -> str:
    """The GPU of a worker among those visible."""
    gpus = visible.split(",")
    return gpus[worker % len(gpus)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under --dist loadfile one worker for each file, one for all files with ranks, and one for all that
    start Ray: those that step together in several workers would wait for each other's cores."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneGang(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return gang(config.rootpath / file) or file

    return OneGang(config, log)


@cache
def gang(file: Path) -> str:
    """The name of the worker that several files share, or ""."""
    text = file.read_text()
    return (
        "ranks" if "ranks: Pools" in text else "ray" if "import ray\n" in text or "from ray." in text else ""
    )


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import write_model  # with transformers, which few tests need

    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def base_url(tiny_folder: Path) -> Iterator[str]:
    """The address of the shared server, ending in /v1."""
    from tests.serving import tiny_config
    from turnout.server.launch import ServerProcess

    server = ServerProcess(tiny_config(tiny_folder), show=False)
    try:
        yield server.wait_ready()
    finally:
        assert server.stop() == 0, server.last_lines()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Pools of processes by number of ranks, started when first used."""
    from tests.ranks import Pools

    pools = Pools()
    try:
        yield pools
    finally:
        pools.close()
