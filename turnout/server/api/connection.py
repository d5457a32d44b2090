"""The client's side of a request: its body within the limit, and the moment it hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turnout.server.api.chunks import short_way
from turnout.server.api.errors import ApiError

DISCARD_FACTOR = 16
BODY_SECONDS = 20  # to send a body in
BODY_RATE = 64 * 2**10  # bytes that give another second
SILENT_SECONDS = 5.0  # of a stream, before it says that it lives: proxies cut those that say nothing
COMMENT = b": waiting\n\n"  # which clients ignore
T = TypeVar("T")


async def read_body(
    request: Request, limit: int, *, small: int, on_large: Callable[[], Awaitable[None]]
) -> bytearray:
    """The body. `on_large` is awaited once more than `small` bytes have come; it may raise ApiError.

    Raises ApiError 413 if the body is longer than `limit` bytes, 408 if it comes too slowly.

    A refused body is received and thrown away, up to a point, before the answer: a client that is still
    sending when the connection closes sees a reset and never reads the reason. One that waits for
    `100 Continue` gets the answer at once.
    """
    announced = _content_length(request)
    if announced > limit and request.headers.get("expect", "").lower() == "100-continue":
        raise _too_large(limit)
    now = asyncio.get_running_loop().time
    body, size = bytearray(), 0
    refusal: ApiError | None = None
    is_large = False
    left = float(BODY_SECONDS)
    chunks = request.stream()
    while size <= DISCARD_FACTOR * limit:
        start = now()
        try:
            async with asyncio.timeout(left):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise _too_slow() from None
        if chunk is None:
            break
        size += len(chunk)
        left += len(chunk) / BODY_RATE - (now() - start)
        if refusal is None:
            try:
                if size > limit:
                    raise _too_large(limit)
                if size > small and not is_large:
                    is_large = True
                    await on_large()
                body += chunk
            except ApiError as error:
                refusal = error
                body = bytearray()
    if refusal is not None:
        raise refusal
    return body


def _content_length(request: Request) -> int:
    try:
        return int(request.headers.get("content-length", 0))
    except ValueError:
        return 0


def _too_slow() -> ApiError:
    return ApiError(
        408,
        f"the body came too slowly: {BODY_SECONDS} s are allowed, and one more for every {BODY_RATE} bytes",
    )


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the request body is larger than {limit} bytes (--max-request-bytes)", code="request_too_large"
    )


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client hangs up. Raises ClientDisconnect then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encode_event(content: Any, name: str = "") -> bytes:
    """One server-sent event: `content` as JSON, and the event's name if it has one."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + msgspec.json.encode(content) + b"\n\n"


class EventStream(Response):
    """Server-sent events from `parts`, until they end or the client hangs up; then `on_end` is called.

    While there are none, as when a request waits for its turn or for new ranks, or a long call of a tool is
    being written, `waiting` keeps it open.
    """

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncIterator[bytes], on_end: Callable[[], None], waiting: bytes = COMMENT):
        self.status_code = 200
        self.background = None
        self._parts = parts
        self._on_end = on_end
        self._waiting = waiting
        self._waits_for_client = True
        self._sent = 0.0  # when something was
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        waiting = asyncio.ensure_future(self._keep_open(send))
        try:
            with suppress(ClientDisconnect):
                await while_connected(receive, self._send(send, short_way(scope)))
        finally:
            waiting.cancel()
            self._on_end()

    async def _send(self, send: Send, write: Callable[[bytes], bool]) -> None:
        """write: see `short_way`."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        now = asyncio.get_running_loop().time
        self._waits_for_client, self._sent = False, now()
        async for part in self._parts:
            if not write(part):
                self._waits_for_client = True
                await send({"type": "http.response.body", "body": part, "more_body": True})
            self._waits_for_client, self._sent = False, now()
        self._waits_for_client = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_open(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        self._sent = now()
        while True:
            await asyncio.sleep(max(0.0, self._sent + SILENT_SECONDS - now()))
            if now() < self._sent + SILENT_SECONDS:
                continue
            if not self._waits_for_client:
                await send({"type": "http.response.body", "body": self._waiting, "more_body": True})
            self._sent = now()
