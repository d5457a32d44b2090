"""The engine as a worker sees it (supervise/interface.py): by messages to the head and from there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from turnout.engine.messages import Abort, AddRequest, Ready
from turnout.server.http_workers.messages import Delivered, Ended, EngineState, Reserve, Reserved, Unreserve
from turnout.server.supervise.ledger import EngineFailed, Sink


class RemoteEngine:
    """send: a message to the head."""

    def __init__(self, send: Callable[[Any], None]):
        self._send = send
        self.ready: Ready | None = None
        self.failure: EngineFailed | None = None
        self.last_failure: EngineFailed | None = None
        self.accepting = False
        self._sinks: dict[str, Sink] = {}
        self._asked = deque[tuple[int, asyncio.Future[int | None]]]()  # for so many places, not answered yet

    async def reserve(self, count: int, room: int) -> int | None:
        """See Engine."""
        answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._asked.append((count, answer))
        self._send(Reserve(count, room))
        return await answer

    def unreserve(self, count: int) -> None:
        """See Engine."""
        if count:
            self._send(Unreserve(count))

    def submit(self, request: AddRequest, sink: Sink) -> None:
        """See Engine."""
        self._sinks[request.id] = sink
        self._send(request)

    def abort(self, ids: Iterable[str]) -> None:
        """See Engine."""
        if known := [id for id in ids if self._sinks.pop(id, None) is not None]:
            self._send(Abort(known))

    def deliver(self, delivered: Delivered) -> None:
        """To whom it belongs; those that were aborted meanwhile are passed over."""
        for output in delivered.outputs:
            sink = self._sinks.get(output.id)
            if sink is not None:
                if output.finish_reason is not None:
                    del self._sinks[output.id]
                sink(output)

    def reserved(self, answer: Reserved) -> None:
        """To whoever asked; places for one that has left meanwhile are given back."""
        count, asked = self._asked.popleft()
        if not asked.done():
            asked.set_result(answer.present)
        elif answer.present is None:
            self.unreserve(count)

    def end(self, ended: Ended) -> None:
        """See Ended."""
        if sink := self._sinks.pop(ended.id, None):
            sink(ended.failure.raised())

    def update(self, state: EngineState) -> None:
        self.accepting = state.accepting
        self.failure = state.failure.raised() if state.failure else None
        self.last_failure = state.last_failure.raised() if state.last_failure else None
