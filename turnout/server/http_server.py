"""uvicorn as every process of a server runs it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from turnout.server.api.guard import GuardedProtocol
from turnout.server.api.turns import BEGUN_AT_ONCE
from turnout.server.request_log import NoteIncoming

SHUTDOWN_GRACE = 5  # seconds for connections to close after the last answer
KEEP_ALIVE = 60  # seconds; longer than clients pause between requests
WAITING_CONNECTIONS = 2048  # that the system keeps until they are accepted


class HttpServer(uvicorn.Server):
    """uvicorn, which on a signal would close its socket at once; we first drain, see `Supervisor`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        await super().startup(list(sockets or ()))
        for listener in sockets or ():  # asyncio has one number for both: accepted at once, and kept waiting
            listener.listen(WAITING_CONNECTIONS)

    @property
    def num_connections(self) -> int:
        return len(self.server_state.connections)

    async def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that another process accepted."""
        state = self.server_state
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: GuardedProtocol(config=self.config, server_state=state, app_state=self.lifespan.state),
            connection,
        )


def http_server(app: Starlette, log_level: str) -> HttpServer:
    """Of `app`, to be run by `serve`."""
    app.add_middleware(NoteIncoming)
    return HttpServer(
        uvicorn.Config(
            app,
            http=GuardedProtocol,
            log_config=None,
            log_level="warning" if log_level == "info" else log_level,
            access_log=log_level == "debug",
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            backlog=BEGUN_AT_ONCE,  # connections accepted in one turn
            timeout_graceful_shutdown=SHUTDOWN_GRACE,
        )
    )
