"""`turnout serve` and `turnout rank`: run the server, or ranks of one, and say in the exit code how it ended.

0  drained after SIGTERM, SIGINT, SIGHUP  1  the engine failed for good
2  a user error (raised as UserError)     128 + n  a second signal n ended it at once
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from concurrent.futures import Future

from turnout.checkpoint.headers import open_folder
from turnout.checkpoint.locate import locate, require_model
from turnout.config import ServerConfig
from turnout.engine.fork_server import ForkServer
from turnout.engine.ranks.local_launcher import (
    rank_environment,
    require_loopback,
    signals_held,
    stop_signals,
)
from turnout.errors import UserError
from turnout.malloc import map_large_blocks
from turnout.server.open_files import allow_many_connections
from turnout.server.supervise.secret import read_secret


def serve(config: ServerConfig) -> int:
    """Serve until told to stop; the exit code. Raises UserError for what the user can fix."""
    _log(config.log_level)
    folder = locate(config.model)
    require_model(folder)
    allow_many_connections(config.tp_size)
    fork_server = ForkServer()
    try:
        if not config.has_remote_ranks:
            if config.tp_size > 1:
                require_loopback()
            _end_when_told(fork_server)
            fork_server.prepare(rank_environment())  # imports, which takes seconds, while this process does
            open_folder(folder)  # elsewhere weights may lie on other hosts only
        return _serve(config, fork_server)
    finally:
        with signals_held():
            fork_server.close()


def _end_when_told(fork_server: ForkServer) -> None:
    """On a signal, end at once, as drained: nothing is served until `Supervisor` handles signals itself."""

    def end(number: int, frame: object) -> None:  # what it raised could be lost in an import
        fork_server.close()
        os._exit(0)

    for number in stop_signals():
        signal.signal(number, end)


def _serve(config: ServerConfig, fork_server: ForkServer) -> int:
    """fork_server: of the ranks here."""
    from turnout.server.run import check_hosts

    if config.tp_size > 1:  # the head has to know which ranks share requests
        from turnout.engine.engine_plan import read_model
        from turnout.engine.parallel_config import with_default_layout

        config = with_default_layout(config, read_model(config).description)
    check_hosts(config)
    if config.node_rank > 0:
        return _serve_as_node(config)
    if config.distributed_executor_backend == "ray":
        from turnout.server.supervise.ray_ranks import RayRanks

        with RayRanks(config) as placed:
            return _serve_http(placed.config, placed.secret, placed.failure, fork_server)
    secret = read_secret(config.secret_file) if config.has_remote_ranks else b""
    return _serve_http(config, secret, None, fork_server)


def _serve_http(
    config: ServerConfig, secret: bytes, failure: Future[None] | None, fork_server: ForkServer
) -> int:
    """As `Supervisor` takes them."""
    from turnout.server.run import Supervisor, bind
    from turnout.server.supervise.ledger import EngineFailed

    map_large_blocks()
    listener = bind(config.host, config.port)
    try:
        return asyncio.run(Supervisor(config, listener, secret, failure, fork_server).run())
    except EngineFailed as failed:
        if failed.user_error:
            raise UserError(str(failed)) from None
        sys.stderr.write(f"error: {failed}\n")
        return 1
    finally:
        listener.close()


def rank(head: str, secret_file: str, *, count: int, model: str, num_threads: int, patience: float) -> int:
    """Run `count` ranks for the head at HOST:PORT; the exit code. Raises UserError.

    model: where it lies here, if not where the head says. num_threads: of each rank, 0 as the head says.
    """
    from turnout.server.supervise.rank_agent import hello, serve_heads, until_signalled

    _log("info")
    secret = read_secret(secret_file)
    own = ({"model": model} if model else {}) | ({"num_threads": num_threads} if num_threads else {})
    hellos = [hello(index, count) for index in range(count)]
    return asyncio.run(until_signalled(serve_heads(head, secret, hellos, own=own, patience=patience)))


def _serve_as_node(config: ServerConfig) -> int:
    """The ranks of host --node-rank, under the command line of all hosts."""
    from msgspec import structs

    from turnout.server.supervise.rank_agent import hello, serve_heads, until_signalled

    secret, count = read_secret(config.secret_file), config.tp_size // config.nnodes
    own = {"model": config.model, "num_threads": config.num_threads}
    first = config.node_rank * count
    hellos = [structs.replace(hello(), order=first + index) for index in range(count)]
    served = serve_heads(config.dist_init_addr, secret, hellos, own=own, patience=config.startup_timeout)
    return asyncio.run(until_signalled(served))


def _log(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s")
