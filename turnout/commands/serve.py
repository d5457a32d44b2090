"""`turnout serve` and `turnout rank`: run the server, or ranks of one, and say in the exit code how it ended.

0  drained after SIGTERM, SIGINT, SIGHUP  1  the engine failed for good
2  a user error (raised as UserError)     128 + n  a second signal n ended it at once
"""

from __future__ import annotations

import asyncio
import logging
import sys
from concurrent.futures import Future

from msgspec import structs

from turnout.checkpoint.headers import open_folder
from turnout.checkpoint.locate import locate, require_model
from turnout.config import ServerConfig
from turnout.engine.ranks.local_launcher import require_loopback
from turnout.errors import UserError
from turnout.malloc import map_large_blocks
from turnout.server.run import Supervisor, allow_many_connections, bind, check_hosts, dialled_in
from turnout.server.supervise.ledger import EngineFailed
from turnout.server.supervise.rank_agent import hello, serve_heads, until_signalled
from turnout.server.supervise.secret import read_secret


def serve(config: ServerConfig) -> int:
    """Serve until told to stop; the exit code. Raises UserError for what the user can fix."""
    _log(config.log_level)
    folder = locate(config.model)
    require_model(folder)
    if not dialled_in(config):  # else weights may lie on other hosts only
        open_folder(folder)
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
            return _serve_http(placed.config, placed.secret, placed.failure)
    return _serve_http(config, read_secret(config.secret_file) if dialled_in(config) else b"", None)


def _serve_http(config: ServerConfig, secret: bytes, failure: Future[None] | None) -> int:
    """failure: see `Supervisor`."""
    if config.tp_size > 1 and not dialled_in(config):
        require_loopback()
    map_large_blocks()
    allow_many_connections(config.tp_size)
    listener = bind(config.host, config.port)
    try:
        return asyncio.run(Supervisor(config, listener, secret, failure).run())
    except EngineFailed as failure:
        if failure.user_error:
            raise UserError(str(failure)) from None
        sys.stderr.write(f"error: {failure}\n")
        return 1
    finally:
        listener.close()


def rank(head: str, secret_file: str, *, count: int, model: str, num_threads: int, patience: float) -> int:
    """Run `count` ranks for the head at HOST:PORT; the exit code. Raises UserError.

    model: where it lies here, if not where the head says. num_threads: of each rank, 0 as the head says.
    """
    _log("info")
    secret = read_secret(secret_file)
    own = ({"model": model} if model else {}) | ({"num_threads": num_threads} if num_threads else {})
    hellos = [hello(index, count) for index in range(count)]
    return asyncio.run(until_signalled(serve_heads(head, secret, hellos, own=own, patience=patience)))


def _serve_as_node(config: ServerConfig) -> int:
    """The ranks of host --node-rank, under the command line of all hosts."""
    secret, count = read_secret(config.secret_file), config.tp_size // config.nnodes
    own = {"model": config.model, "num_threads": config.num_threads}
    first = config.node_rank * count
    hellos = [structs.replace(hello(), order=first + index) for index in range(count)]
    served = serve_heads(config.dist_init_addr, secret, hellos, own=own, patience=config.startup_timeout)
    return asyncio.run(until_signalled(served))


def _log(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s")
