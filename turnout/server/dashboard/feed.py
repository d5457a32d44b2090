"""One message a second to everyone who looks at the dashboard, and one when the server's state changes, since
ranks may be gone for less than a second. Nothing is computed without viewers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from turnout.server.api.connection import encode_event
from turnout.server.api.control import Control
from turnout.server.dashboard.snapshot import Sampler

SECONDS = 1.0
LOOKS = 10  # at the server's state in that time
BEHIND = 4  # messages that a slow viewer may be behind before it misses some
RETRY = b"retry: 1000\n\n"  # milliseconds until a browser tries again


class Feed:
    """Server-sent events: `about` first, and when the ranks have restarted; then `tick`."""

    def __init__(self, control: Control):
        self._control = control
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False
        self._about = b""

    async def watch(self) -> AsyncIterator[bytes]:
        """What one viewer receives, until the feed is closed."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(BEHIND)
        self._viewers.add(queue)
        if self._ticking is None and not self._closed:
            self._ticking = asyncio.create_task(self._tick())
        try:
            yield RETRY + self._about
            while not self._closed and (part := await queue.get()) is not None:
                yield part
        finally:
            self._viewers.discard(queue)

    def close(self) -> None:
        """End all streams: the server is leaving."""
        self._closed = True
        self._publish(None)

    async def _tick(self) -> None:
        """Runs while there are viewers."""
        sampler, ready = Sampler(self._control), None
        try:
            while self._viewers and not self._closed:
                if not self._about or ready is not self._control.engine.ready:
                    ready = self._control.engine.ready
                    self._about = encode_event(sampler.about(), "about")
                    self._publish(self._about)
                self._publish(encode_event(sampler.sample(), "tick"))
                await self._pause()
        finally:
            self._ticking, self._about = None, b""
            self._publish(None)  # whoever is left after a bug connects again

    async def _pause(self) -> None:
        state = self._control.state
        for _ in range(LOOKS):
            await asyncio.sleep(SECONDS / LOOKS)
            if self._control.state != state:
                return

    def _publish(self, part: bytes | None) -> None:
        for queue in self._viewers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(part)
