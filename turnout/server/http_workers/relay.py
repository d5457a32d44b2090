"""Requests that a worker does not answer itself: passed on to the head, and the answer back as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from turnout.server.api.errors import unavailable

# Of one connection (RFC 9110, 7.6.1), and what each end writes by itself.
OWN = {
    b"connection",
    b"keep-alive",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"date",
    b"x-request-id",
}


class Relay:
    """ASGI. head: the Unix socket on which the head serves HTTP."""

    def __init__(self, head: str):
        unlimited = httpx.Limits(max_connections=None)
        transport = httpx.AsyncHTTPTransport(uds=head, limits=unlimited)
        self._client = httpx.AsyncClient(transport=transport, timeout=None, base_url="http://head")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path, query = (scope[part].decode("latin-1") for part in ("raw_path", "query_string"))
        asked = self._client.build_request(
            request.method,
            f"{path}?{query}" if query else path,
            headers=_passed(request.headers.raw),
            content=request.stream() if _has_body(request) else None,
        )
        try:
            answer = await self._client.send(asked, stream=True)
        except httpx.TransportError:
            raise unavailable("the server is shutting down", "shutting_down") from None
        reply = StreamingResponse(_content(answer), answer.status_code)
        reply.raw_headers = _passed(answer.headers.raw)
        await reply(scope, receive, send)

    async def close(self) -> None:
        await self._client.aclose()


def _passed(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in headers if name.lower() not in OWN]


def _has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"


async def _content(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
