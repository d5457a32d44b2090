"""Hosts are lost under load, and every answer is compared with an undisturbed one; all go on within 10 s.

    python -m tools.chaos_hosts demo --failures 12 --output benchmarks/results/chaos-hosts-DEVICE.json
    python -m tools.chaos_hosts demo --site ray --failures 4

Two hosts are network namespaces of this machine (which only root may make): the head runs a rank on one, and
`turnout rank` another one on the other, where a spare waits. In turn the rank is killed, its `turnout rank`
is killed, the cable is cut until that is noticed, and it is cut until a spare on the first host has taken
over. With --site ray they are nodes of a local Ray cluster, one of which is removed without notice while
another one is spare. Exits with 1 if an answer failed or differs, if something is left behind, or if clients
waited for longer than 10 s.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from tests.server.namespaces import Namespace, connect
from tests.server.processes import free_port
from tools import chaos
from tools.command_line import parser_for
from tools.ranks import MODES, chaos_options, finish
from turnout.bench.results import check_output
from turnout.config import ServerConfig, load
from turnout.server.supervise.rank_protocol import PORTS

BACK_SECONDS = 10.0
RAY = {
    "RAY_worker_niceness": "0",  # else ranks wait for whatever else runs here
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",  # with these, a lost node is replaced after 3 s instead of 13
}
LOOK_SECONDS = 0.2  # between looks for processes that have started
GRACE_SECONDS = 30.0  # for ranks that are sent home


class Site(Protocol):
    """Where the ranks are. kinds: of failures, which take turns. Each is undone by `restore` once it was
    noticed, if anything can be, and what it has used up comes back by `restock` once all go on."""

    kinds: Sequence[str]

    def fail(self, kind: str, pid: int) -> None:
        """pid: of the last rank's process."""

    def restore(self, kind: str) -> None: ...

    def restock(self, kind: str) -> None: ...


class TwoHosts:
    """Of the head, and of a `turnout rank` with a spare one, of which there is one on the first host, too,
    before the other is lost."""

    kinds = ("rank", "agent", "cable", "host")

    def __init__(self, folder: Path):
        self.hosts = Namespace(), Namespace()
        address, _ = connect(*self.hosts)
        self.address = f"{address}:{free_port(PORTS)}"
        self.secret = folder / "secret"
        self.secret.write_text("pears and plums, and then some plums\n")
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self._ranks: list[subprocess.Popen[bytes]] = []
        for _ in range(2):
            self._start_rank()

    def config(self, config: ServerConfig) -> ServerConfig:
        return replace(config, nnodes=2, dist_init_addr=self.address, secret_file=str(self.secret))

    def fail(self, kind: str, pid: int) -> None:
        rank = psutil.Process(pid)
        if kind == "rank":
            rank.kill()
        elif kind == "agent":
            rank.parents()[1].kill()
        else:
            self._cable("down")

    def restore(self, kind: str) -> None:
        if kind == "cable":
            self._cable("up")

    def restock(self, kind: str) -> None:
        if kind == "agent" and self._ranks[-1].poll() is None:  # not the one of the first host, after "host"
            self._start_rank()
        elif kind == "cable":
            self._ranks.append(self._rank())  # by the thread of the clients, which are on the first host
        elif kind == "host":
            self._cable("up")

    def _cable(self, state: str) -> None:
        self.hosts[1].ip("link", "set", "cable", state)

    def _start_rank(self) -> None:
        self._ranks.append(self.hosts[1].call(self._rank))

    def _rank(self) -> subprocess.Popen[bytes]:
        words = ["rank", "--head", self.address, "--secret-file", str(self.secret)]
        command = [sys.executable, "-m", "turnout", *words]
        environment = os.environ | {"TMPDIR": str(self.temporary)}
        return subprocess.Popen(command, env=environment)

    def left_behind(self) -> list[str]:
        """Once the head has ended."""
        codes = [rank.wait(GRACE_SECONDS) for rank in self._ranks]
        wrong = [f"a `turnout rank` ended with {code}" for code in codes if code not in (0, -signal.SIGKILL)]
        return wrong + [f"file {path.name} of one" for path in self.temporary.iterdir()]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        for host in self.hosts:
            host.close()


class RayNodes:
    """A cluster of nodes with room for a rank each, and of one without room."""

    kinds = ("node",)

    def __init__(self, count: int):
        from ray.cluster_utils import Cluster

        for name, value in RAY.items():
            os.environ.setdefault(name, value)
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(count)]
        os.environ["RAY_ADDRESS"] = self._cluster.address

    def fail(self, kind: str, pid: int) -> None:
        """Of the node on which that process runs."""
        ancestors = {process.pid for process in psutil.Process(pid).parents()}
        (lost,) = [node for node in self._nodes if ancestors & _pids(node)]
        self._nodes.remove(lost)
        self._cluster.remove_node(lost, allow_graceful=False)

    def restore(self, kind: str) -> None:
        pass  # Ray has another node

    def restock(self, kind: str) -> None:
        pass  # for every loss

    def close(self) -> None:
        self._cluster.shutdown()


def _pids(node: Any) -> set[int]:
    return {started.process.pid for kind in node.all_processes.values() for started in kind}


class AllCpuWaits(chaos.CpuWaits):
    """Of this process and all that it has started, also meanwhile: head, ranks, and those of Ray."""

    def __init__(self) -> None:
        super().__init__(self._pids())
        self._looked = time.monotonic()

    def look(self) -> float:
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self.add(self._pids())
            self._looked = time.monotonic()
        return super().look()

    @staticmethod
    def _pids() -> list[int]:
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


class HostsChaos(chaos.Chaos):
    """`site` fails instead of single ranks."""

    site: Site

    async def _fail(self, kind: str) -> None:
        pid = (await self._info())["ranks"][-1]["pid"]
        waits = AllCpuWaits()
        start = time.monotonic()
        self.site.fail(kind, pid)
        noticed = await self._until(lambda ready: not ready, waits) - start
        on_time = noticed - waits.look()
        self.site.restore(kind)
        ready = await self._until(lambda ready: ready, waits) - start
        why = (await self._info())["last_failure"]
        self.failures.append(
            {
                "kind": kind,
                "noticed_s": noticed,
                "noticed_less_cpu_waits_s": max(on_time, 0.0),
                "ready_s": ready,
                "cpu_waits_s": waits.look(),
                "said": why,
            }
        )
        self.site.restock(kind)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        site = TwoHosts(Path(folder))
        try:
            yield site
        finally:
            site.close()


@contextmanager
def ray_nodes(count: int) -> Iterator[RayNodes]:
    site = RayNodes(count)
    try:
        yield site
    finally:
        site.close()


def run_on_hosts(
    config: ServerConfig, *, clients: int, tokens: int, failures: int, every: float
) -> dict[str, Any]:
    """As `chaos.run`, of a server on two hosts."""
    with two_hosts() as site, ExitStack() as stack:
        config, head = site.config(config), site.hosts[0]
        server, folder = head.call(stack.enter_context, chaos.server_of(config))
        made = HostsChaos(server, folder, tokens, clients)
        made.site = site
        row = head.call(asyncio.run, made.run(site.kinds, failures, every))
        row["exit_code"] = server.stop()
        row["left_behind"] |= dict.fromkeys(site.left_behind(), (0, 1))
    return row


def run_on_ray(
    config: ServerConfig, *, clients: int, tokens: int, failures: int, every: float
) -> dict[str, Any]:
    """As `chaos.run`, of a server on Ray's nodes. What a cluster that lost nodes leaves is Ray's matter."""
    with ray_nodes(config.tp_size + failures) as site:
        config = replace(config, distributed_executor_backend="ray")
        with chaos.server_of(config) as (server, folder):
            made = HostsChaos(server, folder, tokens, clients)
            made.site = site
            row = asyncio.run(made.run(site.kinds, failures, every))
            row["exit_code"] = server.stop()
    return row


def late(row: dict[str, Any], *, less_cpu_waits: bool = False) -> list[str]:
    """What took longer than it may. less_cpu_waits: but for the time in which processes waited for a CPU."""
    waits = {kind: summary["cpu_waits_s"]["most"] for kind, summary in row["kinds"].items()}
    took = {kind: (summary["ready_s"]["most"], waits[kind]) for kind, summary in row["kinds"].items()}
    took["pause of a stream"] = row["longest_pause_s"]["most"], max(waits.values())
    return [
        f"{what}: {seconds:.1f} s, of which processes waited {waited:.1f} s for a CPU"
        for what, (seconds, waited) in took.items()
        if seconds - (waited if less_cpu_waits else 0.0) > BACK_SECONDS
    ]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    chaos_options(parser, clients=32)
    parser.add_argument("--site", choices=["hosts", "ray"], default="hosts")
    options = parser.parse_args()
    check_output(options.output)
    config = load(ServerConfig, {"model": options.model, "port": 0} | chaos.FLAGS | MODES["dp2"])
    common = {name: getattr(options, name) for name in ("clients", "tokens", "failures", "every")}
    if options.site == "ray":
        row = run_on_ray(config, **common)
    else:
        row = run_on_hosts(config, **common)
    row["site"], row["late"] = options.site, late(row)
    failed = bool(row["wrong"] or row["left_behind"] or row["exit_code"] or row["late"])
    finish("chaos-hosts", [row], options.output, failed=failed)


if __name__ == "__main__":
    main()
