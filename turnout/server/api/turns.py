"""Turns of the event loop: requests that come together begin a few at a time, probes before them, and one of
many sequences starts a few of them at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

# Requests of 0.3 to 1 ms each in one turn of the event loop. With 16, 256 clients on an H200 got 12,600
# tokens/s; with 64 they get 14,700, as without a limit (benchmarks/results/serve-starts-nvidia-h200-*).
BEGUN_AT_ONCE = 64
TURN_SECONDS = 0.002  # for one request to start what it asks for
PROBES = ("/health", "/ready", "/metrics")  # open to all, also if there is a key


class Turns:
    """ASGI middleware. Between the requests that it lets begin, streams and probes have their turns."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = 0  # that may begin in this turn
        self._counting = False  # whether `_next` will be called

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBES:
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting, self._left = True, BEGUN_AT_ONCE
            loop.call_soon(self._next)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        self._left = BEGUN_AT_ONCE
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # it has not been cancelled
                turn.set_result(None)
                self._left -= 1
        self._counting = bool(self._waiting)
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next)


class Turn:
    """One task's use of the event loop, a little at a time."""

    def __init__(self) -> None:
        self._end = time.perf_counter() + TURN_SECONDS

    async def share(self) -> bool:
        """Let others run if this turn has been long enough; whether that was so."""
        if time.perf_counter() < self._end:
            return False
        await asyncio.sleep(0)
        self._end = time.perf_counter() + TURN_SECONDS
        return True
