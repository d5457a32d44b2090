"""What the HTTP interface needs of an engine, wherever that runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from turnout.engine.messages import AddRequest, Ready
from turnout.server.supervise.ledger import EngineFailed, Sink


class Engine(Protocol):
    """EngineSupervisor, or RemoteEngine of a process that only serves HTTP.

    ready: what the ranks said when they were first ready. failure: that ended the engine for good.
    """

    @property
    def ready(self) -> Ready | None: ...

    @property
    def failure(self) -> EngineFailed | None: ...

    @property
    def accepting(self) -> bool:
        """Whether requests are taken, if only to wait for ranks that restart."""

    @property
    def last_failure(self) -> EngineFailed | None:
        """Why the ranks had to restart, if they ever had to."""

    async def reserve(self, count: int, room: int) -> int | None:
        """Keep places for so many sequences, which `submit` takes; or, with them there were more than `room`
        submitted and reserved: say how many there are, and keep none."""

    def unreserve(self, count: int) -> None:
        """So many places are not needed after all."""

    def submit(self, request: AddRequest, sink: Sink) -> None:
        """Generate, in a place that was reserved; `sink` is called for every output, or once with the failure
        that ends the request."""

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; those unknown or finished are ignored."""
