"""Turnout's server as a deployment of Ray Serve, which runs, checks and scales replicas of it.

    serve.run(application(ServerConfig(model="demo"), num_replicas=2))

Each replica starts `turnout serve` next to it and passes requests on as they are, streams too.
Needs `ray[serve]`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse

from turnout.config import ServerConfig
from turnout.server.launch import ServerProcess

OF_A_CONNECTION = {"host", "connection", "keep-alive", "transfer-encoding", "upgrade"}


class Replica:
    """A server of its own and the way to it."""

    def __init__(self, config: ServerConfig):
        """Returns when requests are served. Raises UserError."""
        self._server = ServerProcess(replace(config, host="127.0.0.1", port=0), show=False)
        root = self._server.wait_ready().removesuffix("/v1")
        self._client = httpx.AsyncClient(
            base_url=root, timeout=None, limits=httpx.Limits(max_connections=None)
        )

    async def __call__(self, request: Request) -> StreamingResponse:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        forwarded = self._client.build_request(
            request.method,
            httpx.URL(path=path, query=request.scope["query_string"]),
            headers=[(name, value) for name, value in request.headers.items() if name not in OF_A_CONNECTION],
            content=await request.body(),
        )
        reply = await self._client.send(forwarded, stream=True)
        headers = {name: value for name, value in reply.headers.items() if name not in OF_A_CONNECTION}
        return StreamingResponse(
            reply.aiter_raw(), reply.status_code, headers, background=BackgroundTask(reply.aclose)
        )

    def check_health(self) -> None:
        """For Ray Serve, which replaces a replica that raises."""
        if self._server.process.poll() is not None:
            raise RuntimeError(f"the server has ended: {self._server.last_lines()}")

    def __del__(self) -> None:
        self._server.stop()


def application(config: ServerConfig, **options: Any) -> Any:
    """For `serve.run`. options: of the deployment, such as num_replicas or ray_actor_options."""
    from ray import serve

    deployment: Any = serve.deployment(Replica)  # Ray's types take it for a plain function
    return deployment.options(**options).bind(config)
