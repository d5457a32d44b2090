"""A head whose ranks all dial in, each from a shell of its own, on one host; test_hosts.py has two hosts."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.server.processes import Background, eventually, free_port, has_ended, is_ready
from tests.serving import tiny_config
from turnout.server.launch import ServerProcess
from turnout.server.supervise.rank_protocol import ALIVE_SECONDS, HEAD_SILENT_SECONDS, PORTS

TWO_RANKS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}
PROMPTS = ["pears", "plums and pears", "12 apples", "one apple less"]
TOKENS = 400


class Dialled:
    """A head and its ranks."""

    def __init__(self, folder: Path, secret: Path):
        self.address, self.secret = f"127.0.0.1:{free_port(PORTS)}", secret
        self.config = tiny_config(
            folder,
            **TWO_RANKS,
            distributed_executor_backend="external",
            dist_init_addr=self.address,
            secret_file=str(secret),
        )
        self.head = ServerProcess(self.config, show=False)
        self.ranks: list[subprocess.Popen[str]] = []

    def rank(self, *flags: str, secret: Path | None = None, head: str = "") -> subprocess.Popen[str]:
        words = ["rank", "--head", head or self.address, "--secret-file", str(secret or self.secret), *flags]
        command = [sys.executable, "-m", "turnout.cli", *words]
        self.ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return self.ranks[-1]

    def refusal(self, *flags: str, **options) -> str:
        """What a rank says that ends with a user error."""
        rank = self.rank(*flags, **options)
        _, said = rank.communicate(timeout=120)
        assert rank.returncode == 2, said
        assert "Traceback" not in said
        return said

    def close(self) -> None:
        self.head.process.kill()
        self.head.stop()
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


@pytest.fixture(scope="module")
def dialled(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dialled]:
    secret = tmp_path_factory.mktemp("secret") / "secret"
    secret.write_text("pears and plums, and then some plums\n")
    dialled = Dialled(tiny_folder, secret)
    yield dialled
    dialled.close()


@pytest.fixture(scope="module")
def served(dialled: Dialled) -> str:
    """The root address of the head, once two ranks have come."""
    dialled.rank()
    dialled.rank()
    return dialled.head.wait_ready().removesuffix("/v1")


def info(root: str) -> dict[str, Any]:
    return httpx.get(f"{root}/server_info", timeout=60).json()


def process_of(root: str, rank: int) -> psutil.Process:
    return psutil.Process(info(root)["ranks"][rank]["pid"])


def starter_of(rank: psutil.Process) -> psutil.Process:
    """The `turnout rank` whose fork server made the process."""
    return rank.parents()[1]


def test_answers_are_those_of_one_rank(served: str, root: str):
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        texts = [
            httpx.post(f"{at}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
            for at in (served, root)
        ]
        assert texts[0] == texts[1]
    ranks = info(served)["ranks"]
    assert [rank["steps"] > 0 for rank in ranks] == [True, True]


def test_a_killed_one_is_replaced_by_one_that_dials_in(dialled: Dialled, served: str):
    """Requests wait meanwhile; the process of the killed one's rank has ended with it."""
    running = [Background(served, tokens=TOKENS, prompt=prompt) for prompt in ("one", "another")]
    orphan = process_of(served, 0)
    killed = next(rank for rank in dialled.ranks if rank.pid == starter_of(orphan).pid)
    killed.kill()
    assert eventually(lambda: not is_ready(served))  # until another rank dials in
    assert eventually(lambda: has_ended(orphan))
    dialled.rank()
    for stream in running:
        assert stream.num_tokens() == TOKENS
    why = info(served)["last_failure"]
    assert f"rank 0 is lost: on {socket.gethostname()} (127.0.0.1) it closed its connection" in why


@pytest.mark.more
def test_a_spare_takes_over(dialled: Dialled, served: str):
    """It has imported what a rank needs before there is a place for it."""
    spare = dialled.rank()
    assert eventually(lambda: psutil.Process(spare.pid).children())
    (fork_server,) = psutil.Process(spare.pid).children()
    assert eventually(lambda: any("libtorch_cpu" in m.path for m in fork_server.memory_maps()))
    running = Background(served, tokens=TOKENS)
    worker = process_of(served, 1)
    starter_of(worker).terminate()  # told to stop, it says so
    assert running.result()[-1] == "[DONE]"
    assert eventually(lambda: "it was told to stop" in info(served)["last_failure"])
    assert eventually(lambda: is_ready(served))
    assert fork_server.pid in {process_of(served, rank).ppid() for rank in (0, 1)}


def test_those_without_the_secret_are_refused(dialled: Dialled, served: str, tmp_path: Path):
    wrong = tmp_path / "secret"
    wrong.write_text("plums and pears, and then some pears")
    said = dialled.refusal(secret=wrong)
    assert f"the head at {dialled.address} cannot be served: it does not hold the same secret" in said
    said = dialled.refusal(secret=tmp_path / "none")
    assert f"--secret-file {tmp_path / 'none'}: cannot be read" in said
    assert is_ready(served)


def test_those_with_other_weights_are_refused(dialled: Dialled, served: str, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(dialled.config.model, folder)
    (file,) = folder.glob("*.safetensors")
    save_file({name: -weight for name, weight in load_file(file).items()}, file)
    said = dialled.refusal("--model", str(folder))
    assert f"the model there is not the head's: {file.name}" in said
    assert is_ready(served)


@pytest.mark.more
def test_where_there_is_no_head(dialled: Dialled, root: str):
    """Neither nothing at all nor a server of something else."""
    said = dialled.refusal("--startup-timeout", "1", head=f"127.0.0.1:{free_port(PORTS)}")
    assert "within 1 s: Connect call failed" in said
    said = dialled.refusal("--startup-timeout", "1", head=root.removeprefix("http://"))
    assert "within 1 s: it does not speak as Turnout does" in said
    assert "--head here: must be HOST:PORT" in dialled.refusal(head="here")


def test_a_second_head_is_told_of_the_first(dialled: Dialled, served: str):
    second = ServerProcess(dialled.config, show=False)
    assert second.process.wait(120) == 2
    second.stop()
    assert f"--dist-init-addr {dialled.address}: cannot listen there" in second.last_lines()
    assert "stop another head that does" in second.last_lines()


def test_told_to_stop_the_head_sends_all_home(dialled: Dialled, served: str):
    """The last test on this head."""
    serving = [rank for rank in dialled.ranks if rank.poll() is None]
    workers = [process_of(served, rank) for rank in (0, 1)]
    assert dialled.head.stop() == 0
    assert [rank.wait(60) for rank in serving] == [0] * len(serving)
    assert eventually(lambda: all(has_ended(worker) for worker in workers))


@pytest.mark.more
def test_a_stopped_head_is_given_up_and_served_again_when_it_runs(tiny_folder: Path, tmp_path: Path):
    """By SIGSTOP, which keeps its connections open. A rank that has waited long enough says why and ends."""
    secret = tmp_path / "secret"
    secret.write_text("pears and plums, and then some plums\n")
    dialled = Dialled(tiny_folder, secret)
    try:
        dialled.rank()
        dialled.rank()
        served = dialled.head.wait_ready().removesuffix("/v1")
        spare = dialled.rank("--startup-timeout", "5")
        assert eventually(lambda: dialled.head.last_lines().count("a rank has come from") == 3)
        workers = [process_of(served, rank) for rank in (0, 1)]
        running = Background(served, tokens=TOKENS)
        head = psutil.Process(dialled.head.process.pid)
        stopped = time.monotonic()
        head.suspend()
        assert eventually(lambda: all(has_ended(worker) for worker in workers))
        # The last sign of life may be older where the head had to wait for a core.
        assert HEAD_SILENT_SECONDS - ALIVE_SECONDS - 5 < time.monotonic() - stopped < 2 * HEAD_SILENT_SECONDS
        _, said = spare.communicate(timeout=60)
        assert spare.returncode == 2
        assert f"it has not been heard for {HEAD_SILENT_SECONDS:g} s, as if it were stopped" in said
        assert "Traceback" not in said
        head.resume()
        assert running.num_tokens() == TOKENS
    finally:
        dialled.close()


@pytest.mark.more
def test_ranks_that_torchrun_starts(tiny_folder: Path, tmp_path: Path, root: str):
    secret = tmp_path / "secret"
    secret.write_text("pears and plums, and then some plums\n")
    dialled = Dialled(tiny_folder, secret)
    rank = ["-m", "turnout.cli", "rank", "--head", dialled.address, "--secret-file", str(secret)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen([*torchrun, *rank], stderr=subprocess.PIPE, text=True) as ranks:
        try:
            served = dialled.head.wait_ready().removesuffix("/v1")
            body = {"prompt": "pears", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            answers = [httpx.post(f"{at}/v1/completions", json=body, timeout=60) for at in (served, root)]
            texts = [answer.json()["choices"][0]["text"] for answer in answers]
            assert texts[0] == texts[1]
            starters = [starter_of(process_of(served, number)) for number in (0, 1)]
            assert [starter.ppid() for starter in starters] == [ranks.pid] * 2
            assert dialled.head.stop() == 0
            _, said = ranks.communicate(timeout=60)
            assert ranks.returncode == 0, said
        finally:
            ranks.terminate()
            dialled.close()
