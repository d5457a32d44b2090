"""The fork server by itself: what its copies are, and how each of them, it, or its starter may end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.server.processes import eventually, has_ended
from turnout.engine import fork_server
from turnout.engine.fork_server import ForkedProcess, ForkServer


class Forked:
    """A rank without orders: it waits for them on its standard input. A thread waits for its end."""

    def __init__(self, server: ForkServer, keeper: int | None = None):
        self.process: ForkedProcess = server.fork(dict(os.environ), keeper=keeper)
        self.codes: list[int] = []
        self._thread = threading.Thread(target=lambda: self.codes.append(self.process.wait()), daemon=True)
        self._thread.start()

    def system(self) -> psutil.Process:
        """Once it runs."""
        assert eventually(lambda: self.process.pid is not None)
        return psutil.Process(self.process.pid)

    def code(self) -> int:
        self._thread.join(60)
        return self.codes[0]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def test_copies_have_imported_torch_and_tell_how_they_end(server: ForkServer):
    before = psutil.Process().children()  # of other tests of this process, perhaps
    ranks = [Forked(server) for _ in range(3)]
    first, second, third = (rank.system() for rank in ranks)
    assert first.parent() == second.parent() == third.parent()
    assert any("libtorch_cpu" in mapped.path for mapped in first.memory_maps())
    assert first.num_threads() == 1
    first.send_signal(signal.SIGSEGV)
    assert ranks[0].code() == -signal.SIGSEGV
    ranks[1].process.stdin.close()  # as when the server ends before it gave orders
    assert ranks[1].code() == 1
    assert third.is_running()
    ranks[2].process.kill()
    assert ranks[2].code() == -signal.SIGKILL
    assert eventually(
        lambda: not any(has_ended(child) for child in psutil.Process().children() if child not in before)
    )


def test_what_ranks_on_gpus_import_opens_no_driver():
    """With it open, or with more threads, copies would not be as good as processes of their own."""
    code = (
        "import sys, psutil, torch\n"
        "from turnout.engine import fork_server\n"
        "def drivers():\n"
        "    libraries = {mapped.path for mapped in psutil.Process().memory_maps()}\n"
        "    return {path for path in libraries if 'libcuda.' in path or 'libamdhip' in path}\n"
        "threads, with_torch = psutil.Process().num_threads(), drivers()\n"  # cuBLAS maps it, and no more
        "fork_server.import_for_gpus()\n"
        "from triton.runtime.cache import triton_key\n"
        "assert triton_key.cache_info().currsize == 1\n"
        "assert {'turnout.kernels.hopper.gemm', 'turnout.moe.backends.hopper.runner'} <= sys.modules.keys()\n"
        "assert not {'torch._dynamo', 'torch._inductor'} & sys.modules.keys()\n"
        "assert drivers() == with_torch\n"
        "assert psutil.Process().num_threads() == threads\n"
        "assert not fork_server._driver_is_open()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_kernels_that_cannot_be_imported_stay_with_the_ranks(tmp_path: Path, monkeypatch, capsys):
    """As with a Triton that lacks what they are written in: a rank may do without them."""
    (tmp_path / "made_for_another_triton.py").write_text("import triton\ntriton.absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_server, "IMPORTED_ON_GPU", ("made_for_another_triton",))
    fork_server.import_for_gpus()
    assert "ranks import GPU kernels themselves: AttributeError: module 'triton'" in capsys.readouterr().err


@pytest.mark.more
def test_ranks_end_when_the_fork_server_is_killed_and_another_takes_its_place(server: ForkServer):
    rank = Forked(server)
    process = rank.system()
    process.parent().kill()
    assert rank.code() == -signal.SIGKILL
    assert eventually(lambda: has_ended(process))
    again = Forked(server)
    assert again.system().is_running()
    again.process.kill()
    assert again.code() == -signal.SIGKILL


def test_keepers_outlive_ranks_and_are_replaced_when_they_die(capfd):
    server = ForkServer()

    def keepers() -> list[psutil.Process]:
        children = parent.children()
        return [child for child in children if not has_ended(child) and child.name() == "turnout keeper"]

    def rank(keeper: int | None) -> Forked:
        made = Forked(server, keeper)
        made.system()
        return made

    ranks = [rank(number) for number in (0, 1, 1, None)]
    parent = ranks[0].system().parent()
    first, second = keepers()
    for other in ranks:
        other.process.kill()
        assert other.code() == -signal.SIGKILL
    assert keepers() == [first, second]
    first.kill()
    assert eventually(lambda: keepers() == [second])
    ranks = [rank(0), rank(1)]
    assert len(keepers()) == 2
    assert second in keepers()
    assert "the keeper of the weights on GPU 0 was killed by SIGKILL" in capfd.readouterr().err
    left = keepers()
    server.close()  # while ranks hold what they got
    assert eventually(lambda: all(has_ended(keeper) for keeper in left))
    for other in ranks:
        other.process.kill()


def test_a_spare_becomes_the_next_rank_of_its_gpu():
    server = ForkServer()

    def spares() -> list[psutil.Process]:
        children = parent.children()
        return [child for child in children if not has_ended(child) and child.name() == "turnout spare"]

    def spare(number: int) -> psutil.Process:
        before = spares()
        for _ in range(2):  # the second finds it there
            server.make_spare(number)
        assert eventually(lambda: len(spares()) == len(before) + 1)
        (made,) = (one for one in spares() if one not in before)
        return made

    ranks = [Forked(server, number) for number in (0, 1)]
    parent = ranks[0].system().parent()
    first, second = spare(0), spare(1)
    ranks += [Forked(server, 1), Forked(server, 1), Forked(server)]
    assert [rank.system() == second for rank in ranks[2:]] == [True, False, False]
    assert eventually(lambda: spares() == [first])
    ranks[2].process.stdin.close()  # as when the server ends before it gave orders
    assert ranks[2].code() == 1
    ranks[3].process.kill()
    assert ranks[3].code() == -signal.SIGKILL
    first.kill()
    assert eventually(lambda: spares() == [])
    again = Forked(server, 0)
    assert again.system() not in (first, ranks[0].system())
    third = spare(0)
    server.close()
    assert eventually(lambda: has_ended(third))
    for rank in (*ranks, again):
        rank.process.kill()


def test_killed_before_it_runs():
    server = ForkServer()
    rank = Forked(server)
    rank.process.kill()
    start = time.monotonic()
    assert rank.code() == -signal.SIGKILL
    assert time.monotonic() - start < 30
    server.close()


def test_a_killed_starter_takes_the_fork_server_along():
    code = (
        "import os, time\n"
        "from turnout.engine.fork_server import ForkServer\n"
        "server = ForkServer()\n"
        "server.fork(dict(os.environ))\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "ready\n"
        children = psutil.Process(starter.pid).children(recursive=True)
        assert children
        starter.kill()
    assert eventually(lambda: all(has_ended(child) for child in children))
