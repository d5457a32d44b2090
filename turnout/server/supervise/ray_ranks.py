"""Ranks on a Ray cluster: Ray decides where they run, and starts those of a lost node elsewhere.

An actor for each host runs its ranks, which dial in to the head like any others (rank_agent.py), so that Ray
has no part in steps, nor in what becomes of requests. Ranks of one actor share a fork server, and so imports
and prepared weights. The only file that imports Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from packaging.version import Version

from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.parallel.topology import divisors, split_address
from turnout.server.supervise.ledger import EngineFailed
from turnout.server.supervise.rank_agent import serve_heads, visible_gpus
from turnout.server.supervise.rank_protocol import PORTS, SILENT_SECONDS, Hello

OLDEST = "2.50"
WAITING_SECONDS = 5.0  # between lines of the log that say so
LOW_PORTS, HIGH_PORTS = 20000, 32000  # of heads: below those that systems pick for connections

log = logging.getLogger("turnout.server")


class RayRanks:
    """A context in which Ray runs all ranks of a server.

    config, secret, failure: for the server, which says to where the ranks dial in.
    """

    def __init__(self, config: ServerConfig):
        """Join the cluster of RAY_ADDRESS or of this host, or else start one here. Raises UserError if Ray is
        missing, or what ranks need is."""
        self._ray = _import_ray()
        _join_or_start(self._ray, config)
        resources = self._ray.cluster_resources()
        on_gpus = config.device == "cuda" or (config.device != "cpu" and resources.get("GPU"))
        self._kind = "GPU" if on_gpus else "CPU"
        nnodes = count_hosts(self._ray, self._kind, config)
        address = f"{self._ray.util.get_node_ip_address()}:{_free_port()}"
        self.config = replace(config, nnodes=nnodes, dist_init_addr=address)
        self.secret = secrets.token_bytes(32)
        self._group: Any = None
        self._actors: list[Any] = []
        self.failure: Future[None] = Future()  # gets the first exception that ended an actor's ranks

    def __enter__(self) -> RayRanks:
        per_host = self.config.tp_size // self.config.nnodes
        strategy = "STRICT_SPREAD" if self.config.nnodes > 1 else "PACK"
        bundles = [{self._kind: per_host}] * self.config.nnodes
        self._group = self._ray.util.placement_group(bundles, strategy=strategy)
        self._wait_for_room()
        for host in range(self.config.nnodes):
            self._start(host, per_host)
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()  # actors and what was reserved go with it

    def _wait_for_room(self) -> None:
        """Until Ray has reserved what the ranks need. Raises UserError."""
        deadline = time.monotonic() + self.config.startup_timeout
        while not self._group.wait(WAITING_SECONDS):
            there = self._ray.available_resources().get(self._kind, 0)
            text = f"{self.config.tp_size} {self._kind}s for ranks, of which Ray has {there:g} free"
            if time.monotonic() > deadline:
                self._ray.shutdown()
                raise UserError(
                    f"no room within --startup-timeout {self.config.startup_timeout:g} s for {text}; stop "
                    "what else uses the cluster, or add nodes with `ray start --address`"
                )
            log.info("waiting for %s", text)

    def _start(self, host: int, count: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        on_gpus = self._kind == "GPU"
        # Else Ray sets CUDA_VISIBLE_DEVICES, as the head does. An environment costs one more process.
        environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"} if on_gpus else {}
        actor = self._ray.remote(_Host).options(
            num_cpus=0 if on_gpus else count,
            num_gpus=count if on_gpus else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=host
            ),
            max_restarts=-1,
            max_task_retries=-1,  # `run` again in the actor that replaces a lost one
            runtime_env={"env_vars": environment} if environment else None,
        )
        self._actors.append(actor.remote())
        config, ranks = self.config, range(host * count, (host + 1) * count)
        run = self._actors[-1].run.remote(config.dist_init_addr, self.secret, ranks, config.startup_timeout)
        run.future().add_done_callback(partial(self._note_end, ranks))

    def _note_end(self, ranks: range, run: Future[int]) -> None:
        """Of an actor's ranks, which nothing replaces if they ended with an exception."""
        error = run.exception()
        if error is None or self.failure.done():
            return
        cause = getattr(error, "cause", None) or error
        text = f"the ranks {ranks.start} to {ranks.stop - 1} on Ray ended: {cause}"
        self.failure.set_exception(
            UserError(text) if isinstance(cause, UserError) else EngineFailed(text, spoken=True)
        )


class _Host:
    """The actor of a host's ranks."""

    def run(self, head: str, secret: bytes, ranks: range, patience: float) -> int:
        """Serve the head until it says that all is done; the exit code. Raises UserError."""
        ray = _import_ray()
        os.environ.pop("OMP_NUM_THREADS", None)  # of Ray's making; the engine counts cores itself
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        node = ray.get_runtime_context().get_node_id()
        hellos = [Hello(socket.gethostname(), node, rank, gpus) for rank in ranks]
        return asyncio.run(serve_heads(head, secret, hellos, own={}, patience=patience))


def _import_ray() -> Any:
    remedy = f"pip install 'turnout[ray]' (ray >= {OLDEST}), or leave --distributed-executor-backend ray out"
    try:
        import ray
    except ImportError as error:
        raise UserError(f"--distributed-executor-backend ray: {error}; {remedy}") from None
    if Version(ray.__version__) < Version(OLDEST):
        raise UserError(f"--distributed-executor-backend ray: there is ray {ray.__version__}; {remedy}")
    return ray


def _join_or_start(ray: Any, config: ServerConfig) -> None:
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        if parts := split_address(address):
            socket.create_connection(parts, SILENT_SECONDS).close()  # Ray itself would try for minutes
        ray.init(address="auto", logging_level="warning")
        return
    except (OSError, RuntimeError, ValueError) as error:  # also a cluster of another version
        if address or not isinstance(error, ConnectionError):
            where = f"RAY_ADDRESS {address}" if address else "the Ray cluster of this host"
            raise UserError(f"{where} cannot be joined: {error}") from None
    log.info("no Ray cluster is running here: starting one of this host")
    cpus = os.cpu_count() or 1
    if config.device == "cpu" or not visible_gpus():  # ranks may share cores, as they do without Ray
        cpus = max(cpus, config.tp_size)
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # else a process for each CPU, unused
    os.environ.setdefault("RAY_worker_niceness", "0")  # else 15: ranks would wait for whatever else runs
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level="warning")


def count_hosts(ray: Any, kind: str, config: ServerConfig) -> int:
    """The fewest that can hold all ranks, as many on each. Raises UserError."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    room = [int(node["Resources"].get(kind, 0)) for node in nodes]
    counts = [config.nnodes] if config.nnodes > 1 else divisors(config.tp_size)
    for nnodes in counts:
        if sum(one >= config.tp_size // nnodes for one in room) >= nnodes:
            return nnodes
    there = ", ".join(
        f"{one} on {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for one, node in zip(room, nodes, strict=True)
    )
    raise UserError(
        f"--tp-size {config.tp_size}: Ray's nodes have too few {kind}s for as many ranks, evenly over "
        f"{config.nnodes if config.nnodes > 1 else 'any number of'} hosts: {there}; add nodes with "
        "`ray start --address`, or use fewer ranks"
    )


def _free_port() -> int:
    """The first of PORTS free ones in a row."""
    for port in range(LOW_PORTS + secrets.randbelow(HIGH_PORTS - LOW_PORTS - 1000), HIGH_PORTS, PORTS):
        if all(_is_free(port + place) for place in range(PORTS)):
            return port
    raise UserError(f"no {PORTS} ports in a row are free below {HIGH_PORTS}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
