"""`turnout serve`: run the server, or the ranks of one more host, and say how it ended in the exit code.

0  drained after SIGTERM or SIGINT       1  the engine failed for good
2  a user error (raised as UserError)    128 + n  a second signal n ended it at once
"""

from __future__ import annotations

import asyncio
import logging
import sys

from turnout.checkpoint.locate import locate, require_folder
from turnout.config import ServerConfig
from turnout.errors import UserError
from turnout.server.memory import allow_many_connections, map_large_blocks
from turnout.server.run import Supervisor, bind, check_hosts
from turnout.server.supervise.ledger import EngineFailed
from turnout.server.supervise.node_agent import serve_ranks


def serve(config: ServerConfig) -> int:
    """Serve until told to stop; the exit code. Raises UserError for what the user can fix."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    require_folder(locate(config.model))
    check_hosts(config)
    if config.node_rank > 0:
        return serve_ranks(config)
    map_large_blocks()
    allow_many_connections()
    listener = bind(config.host, config.port)
    try:
        return asyncio.run(Supervisor(config, listener).run())
    except EngineFailed as failure:
        if failure.user_error:
            raise UserError(str(failure)) from None
        sys.stderr.write(f"error: {failure}\n")
        return 1
    finally:
        listener.close()
