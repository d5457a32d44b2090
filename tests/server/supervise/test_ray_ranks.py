"""Ranks on a Ray cluster of several nodes, which are processes of this machine; what is said without Ray."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.processes import Background, eventually, free_port, is_ready
from tests.serving import tiny_config
from turnout.errors import UserError
from turnout.server.launch import ServerProcess
from turnout.server.supervise.ray_ranks import RayRanks, count_hosts

TWO_RANKS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}
ON_RAY = TWO_RANKS | {"distributed_executor_backend": "ray", "startup_timeout": 120}
TOKENS = 400


def assert_same_answers(served: str, root: str) -> None:
    for prompt in ("pears", "plums and pears"):
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        texts = [
            httpx.post(f"{at}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
            for at in (served, root)
        ]
        assert texts[0] == texts[1]


def test_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"backend ray: .*; pip install 'turnout\[ray\]' \(ray >= 2.50\)"):
        RayRanks(tiny_config(tmp_path, **ON_RAY))


def test_with_an_old_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    old = types.ModuleType("ray")
    old.__version__ = "2.9.3"
    monkeypatch.setitem(sys.modules, "ray", old)
    with pytest.raises(UserError, match=r"there is ray 2.9.3; pip install 'turnout\[ray\]' \(ray >= 2.50\)"):
        RayRanks(tiny_config(tmp_path, **ON_RAY))


def ray_of(init: Callable[..., None]) -> types.ModuleType:
    """What Ray says where there is none to join."""
    ray = types.ModuleType("ray")
    ray.__version__, ray.init = "2.50.0", init
    return ray


def test_an_address_where_nobody_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Ray itself is not asked, which would try for minutes."""
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setitem(sys.modules, "ray", ray_of(lambda **fields: None))
    with pytest.raises(UserError, match=f"RAY_ADDRESS {address} cannot be joined: .*refused"):
        RayRanks(tiny_config(tmp_path, **ON_RAY))


@pytest.mark.parametrize(
    ("address", "error", "where"),
    [
        ("nonsense", ValueError("Invalid address format: nonsense"), "RAY_ADDRESS nonsense"),
        ("", RuntimeError("Version mismatch"), "the Ray cluster of this host"),
    ],
)
def test_a_cluster_that_cannot_be_joined(
    address: str, error: Exception, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def init(**fields: Any) -> None:
        raise error

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setitem(sys.modules, "ray", ray_of(init))
    with pytest.raises(UserError, match=f"{where} cannot be joined: {error}"):
        RayRanks(tiny_config(tmp_path, **ON_RAY))


def test_ranks_are_spread_evenly_over_the_fewest_hosts_that_have_room(tmp_path: Path):
    """Ray says what nodes there are; those that are gone do not count."""
    rooms = [("a", 4, True), ("b", 2, True), ("c", 2, True), ("d", 8, False)]
    nodes = [
        {
            "Alive": alive,
            "Resources": {"CPU": 1.0, "GPU": float(gpus)},
            "NodeManagerHostname": name,
            "NodeManagerAddress": "10.0.0.1",
        }
        for name, gpus, alive in rooms
    ]
    ray = types.SimpleNamespace(nodes=lambda: nodes)

    def hosts(ranks: int, **fields: int) -> int:
        return count_hosts(ray, "GPU", tiny_config(tmp_path, tp_size=ranks, **fields))

    assert [hosts(ranks) for ranks in (1, 2, 4, 6)] == [1, 1, 1, 3]
    assert hosts(4, nnodes=2) == 2
    there = r"4 on a \(10.0.0.1\), 2 on b \(10.0.0.1\), 2 on c \(10.0.0.1\); add nodes with"
    with pytest.raises(UserError, match=rf"too few GPUs for as many ranks, .* any number of hosts: {there}"):
        hosts(8)
    with pytest.raises(UserError, match=rf"evenly over 2 hosts: {there}"):
        hosts(6, nnodes=2)


@pytest.mark.more
def test_one_command_on_a_machine_without_a_cluster(
    tiny_folder: Path, root: str, monkeypatch: pytest.MonkeyPatch
):
    """It starts one, with room for more ranks than there are cores, also without --device cpu."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    four = ON_RAY | {"tp_size": 4, "dp_size": 4, "ep_size": 4, "device": "auto"}
    server = ServerProcess(tiny_config(tiny_folder, **four), show=False)
    try:
        served = server.wait_ready().removesuffix("/v1")
        assert_same_answers(served, root)
        assert server.stop() == 0, server.last_lines()
    finally:
        server.process.kill()


class Nodes:
    """A cluster of a node without room for ranks, and others with room for one each, which come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self._nodes: list[Any] = []

    def add(self) -> None:
        self._nodes.append(self.cluster.add_node(num_cpus=1))

    def lose_the_oldest(self) -> None:
        self.cluster.remove_node(self._nodes.pop(0), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else ranks wait for whatever else runs here
        nodes = Nodes()
        try:
            nodes.add()
            nodes.add()
            patch.setenv("RAY_ADDRESS", nodes.cluster.address)
            yield nodes
        finally:
            nodes.cluster.shutdown()


@pytest.mark.more
def test_the_head_ends_at_once_with_what_an_actor_says(
    nodes: Nodes, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its ranks look for a relative folder in another place than the head."""
    monkeypatch.chdir(tiny_folder.parent)
    server = ServerProcess(tiny_config(Path(tiny_folder.name), **ON_RAY), show=False)
    try:
        assert server.process.wait(110) == 2  # --startup-timeout is 120 s
        said = server.last_lines()
        assert "the ranks 0 to 0 on Ray ended" in said or "the ranks 1 to 1 on Ray ended" in said
        assert tiny_folder.name in said
    finally:
        server.process.kill()
        server.stop()


@pytest.fixture(scope="module")
def served(nodes: Nodes, tiny_folder: Path) -> Iterator[str]:
    server = ServerProcess(tiny_config(tiny_folder, **ON_RAY), show=False)
    try:
        yield server.wait_ready().removesuffix("/v1")
        assert server.stop() == 0, server.last_lines()
    finally:
        server.process.kill()


def lose_a_node(nodes: Nodes, served: str) -> list[Background]:
    """Streams that run while the oldest node is lost, which has a rank."""
    running = [Background(served, tokens=TOKENS, prompt=prompt) for prompt in ("one", "another", "a third")]
    nodes.lose_the_oldest()
    assert eventually(lambda: not is_ready(served), 30)
    return running


def survive(running: list[Background]) -> None:
    assert all(stream.num_tokens() == TOKENS for stream in running)


@pytest.mark.more
def test_answers_are_those_of_one_rank(served: str, root: str):
    assert_same_answers(served, root)


@pytest.mark.more
def test_requests_wait_for_a_node_that_is_added(nodes: Nodes, served: str):
    running = lose_a_node(nodes, served)
    nodes.add()
    survive(running)


@pytest.mark.more
def test_a_spare_node_takes_over(nodes: Nodes, served: str):
    nodes.add()
    survive(lose_a_node(nodes, served))


@pytest.mark.more
@pytest.mark.parametrize(("device", "kind", "most"), [("auto", "CPU", 1), ("cuda", "GPU", 0)])
def test_too_few(device: str, kind: str, most: int, nodes: Nodes, served: str, tiny_folder: Path):
    more = ON_RAY | {"tp_size": 8, "dp_size": 8, "ep_size": 8, "device": device}
    server = ServerProcess(tiny_config(tiny_folder, **more), show=False)
    assert server.process.wait(120) == 2
    server.stop()
    said = server.last_lines()
    assert f"--tp-size 8: Ray's nodes have too few {kind}s for as many ranks, evenly over any number" in said
    assert "0 on" in said
    assert f"{most} on" in said
