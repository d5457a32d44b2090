"""Routes as decorators: Starlette's own ones, with what every request to them must pass first."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class Routes:
    """check: raises ApiError for requests that may not pass."""

    def __init__(self, check: Callable[[Request], None] | None = None):
        self.routes: list[Route] = []
        self._check = check

    def get(self, path: str, *, head: bool = True) -> Callable[[Endpoint], Endpoint]:
        """head: whoever may read may ask whether there is something to read. Streams that do not end have no
        answer to that."""
        return self._add(path, "GET", head=head)

    def post(self, path: str) -> Callable[[Endpoint], Endpoint]:
        return self._add(path, "POST")

    def _add(self, path: str, method: str, *, head: bool = True) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            route = Route(path, self._checked(endpoint), methods=[method])
            if not head and route.methods:
                route.methods.discard("HEAD")
            self.routes.append(route)
            return endpoint

        return add

    def _checked(self, endpoint: Endpoint) -> Endpoint:
        check = self._check
        if check is None:
            return endpoint

        async def checked(request: Request) -> Response:
            check(request)
            return await endpoint(request)

        return checked
