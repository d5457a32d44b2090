"""X-Request-Id: taken from a request or made for it, and sent with the answer."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
_FIT = re.compile(r"[!-~]{1,256}")  # others are replaced, since logs and answers repeat them


class RequestIds:
    """ASGI middleware. What the client gave stands in `request.state.given_id`, else None."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = HTTPConnection(scope).headers.get(HEADER, "")
        fits = _FIT.fullmatch(given) is not None
        id = given if fits else uuid.uuid4().hex
        scope.setdefault("state", {})["given_id"] = given if fits else None

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = id
            await send(message)

        await self._app(scope, receive, with_id)
