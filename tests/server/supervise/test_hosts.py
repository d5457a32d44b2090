"""One server on two hosts, which are network namespaces: nothing passes between them but by their cable."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.namespaces import Namespace, connect
from tests.server.processes import Background, eventually, has_ended, ranks_of
from tests.serving import tiny_config
from turnout.server.launch import ServerProcess
from turnout.server.supervise.rank_protocol import SILENT_SECONDS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")

TWO_HOSTS = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True, "nnodes": 2}
PORT = 29400
SECONDS = 60.0
TOKENS = 400


class Hosts:
    """Node 0 is the head. `start` may be called again for a node whose server has ended."""

    def __init__(self, folder: Path):
        self.hosts = Namespace(), Namespace()
        self.address, _ = connect(*self.hosts)
        self.folder = folder
        self.secret = folder.with_name("secret")
        self.secret.write_text("pears and plums, and then some plums\n")
        self.servers: list[ServerProcess] = []

    def start(self, node: int, **fields: Any) -> ServerProcess:
        address = {"dist_init_addr": f"{self.address}:{PORT}", "secret_file": str(self.secret)}
        common = TWO_HOSTS | address | {"node_rank": node}
        config = tiny_config(self.folder, **(common | fields))
        server = self.hosts[node].call(ServerProcess, config, show=False)
        self.servers.append(server)
        return server

    def close(self) -> None:
        for server in self.servers:
            server.process.kill()
            server.stop()
        for host in self.hosts:
            host.close()


@pytest.fixture(scope="module")
def hosts(tiny_folder: Path) -> Iterator[Hosts]:
    hosts = Hosts(tiny_folder)
    yield hosts
    hosts.close()


class Cluster:
    """A head and an agent that serve."""

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self.agent = hosts.start(1)
        self.restart_head()

    def restart_head(self) -> None:
        self.head = self.hosts.start(0)
        self.root = self.head.wait_ready().removesuffix("/v1")

    def at_head(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.hosts.hosts[0].call(httpx.request, method, self.root + path, timeout=60, **options)

    def complete(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        reply = self.at_head("POST", "/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]

    def streams(self) -> list[Background]:
        """One on each rank."""
        return [self.hosts.hosts[0].call(_stream, self.root, prompt) for prompt in ("one", "another")]

    def survive(self, streams: list[Background], why: str) -> None:
        """All streams go on to their end after a failure, which `why` names."""
        assert all(stream.num_tokens() == TOKENS for stream in streams)
        # Streams that had ended before the failure do not wait until it is noticed.
        assert eventually(lambda: why in self.at_head("GET", "/server_info").json()["last_failure"])


def _stream(root: str, prompt: str) -> Background:
    return Background(root, tokens=TOKENS, prompt=prompt)  # a new thread belongs to its starter's namespace


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Cluster:
    return Cluster(hosts)


def test_a_request_is_answered_as_by_one_rank(cluster: Cluster, root: str):
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for prompt in ("pears", "plums and pears"):
        alone = httpx.post(f"{root}/v1/completions", json=body | {"prompt": prompt}, timeout=60).json()
        assert cluster.complete(prompt) == alone["choices"][0]["text"]
    ranks = cluster.at_head("GET", "/server_info").json()["ranks"]
    assert [rank["steps"] > 0 for rank in ranks] == [True, True]
    assert [rank["pid"] for rank in ranks] == [
        ranks_of(server)[0].pid for server in (cluster.head, cluster.agent)
    ]


def test_a_rank_killed_on_the_other_host(cluster: Cluster):
    running, old = cluster.streams(), [ranks_of(at)[0] for at in (cluster.head, cluster.agent)]
    old[1].kill()
    cluster.survive(running, "rank 1 was killed by SIGKILL")
    assert eventually(lambda: all(has_ended(rank) for rank in old))


@pytest.mark.more
def test_an_agent_that_leaves_is_waited_for(cluster: Cluster):
    running, ranks = cluster.streams(), ranks_of(cluster.agent)
    cluster.agent.process.terminate()
    assert cluster.agent.stop() == 0
    assert eventually(lambda: all(has_ended(rank) for rank in ranks))
    assert eventually(lambda: cluster.at_head("GET", "/ready").status_code == 503)
    assert cluster.at_head("GET", "/ready").json()["error"]["code"] == "restarting"
    cluster.agent = cluster.hosts.start(1)
    cluster.survive(running, f"rank 1 is lost: on {socket.gethostname()} (10.77.0.2) it was told to stop")
    cluster.complete("together again")


@pytest.mark.more
def test_agents_outlive_a_killed_head_and_ranks_do_not_outlive_a_killed_agent(cluster: Cluster):
    ranks = [*ranks_of(cluster.head), *ranks_of(cluster.agent)]
    cluster.head.process.kill()
    assert eventually(lambda: all(has_ended(rank) for rank in ranks))
    cluster.head.stop()
    cluster.restart_head()
    running, ranks = cluster.streams(), ranks_of(cluster.agent)
    cluster.agent.process.kill()
    assert eventually(lambda: all(has_ended(rank) for rank in ranks))
    cluster.agent = cluster.hosts.start(1)
    cluster.survive(running, "rank 1 ")


@pytest.mark.more
def test_a_cable_that_is_cut_for_a_while(cluster: Cluster):
    """Both sides notice, neither waits for the other, and the rank dials in again when it can."""
    running, rank = cluster.streams(), ranks_of(cluster.agent)[0]
    cluster.hosts.hosts[1].ip("link", "set", "cable", "down")
    assert eventually(lambda: cluster.at_head("GET", "/ready").status_code == 503, SILENT_SECONDS + 30)
    assert eventually(lambda: has_ended(rank))
    cluster.hosts.hosts[1].ip("link", "set", "cable", "up")
    cluster.survive(running, "rank ")


def test_told_to_stop_the_head_drains_and_sends_all_home(cluster: Cluster):
    ranks = [*ranks_of(cluster.head), *ranks_of(cluster.agent)]
    running = cluster.streams()
    cluster.head.process.terminate()
    for stream in running:
        assert stream.result()[-1] == "[DONE]"
    assert cluster.head.process.wait(SECONDS) == 0
    assert cluster.agent.process.wait(SECONDS) == 0
    assert eventually(lambda: all(has_ended(rank) for rank in ranks))


def test_an_agent_without_a_head_gives_up(hosts: Hosts):
    """The last test on the two hosts."""
    agent = hosts.start(1, startup_timeout=1.0)
    assert agent.process.wait(SECONDS) == 2
    agent.stop()
    assert f"no head at {hosts.address}:{PORT} within 1 s" in agent.last_lines()
