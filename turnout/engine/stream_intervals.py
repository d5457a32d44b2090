"""Tokens that leave a rank together: a request's first at once, then as many at a time as it asks for.

Each message of an answer costs the server's process, the network and the client about the same however many
tokens it holds, and hundreds of streams send as many messages a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from turnout.engine.messages import Abort, AddRequest, Command, RequestOutput, as_one


class StreamIntervals:
    """Holds outputs of requests back until these have `AddRequest.stream_interval` tokens or end. Nothing is
    held of a request whose interval is 1."""

    def __init__(self) -> None:
        self._interval: dict[str, int] = {}  # of requests with another than 1
        self._held: dict[str, list[RequestOutput]] = {}

    def note(self, command: Command) -> None:
        """`command` is being executed."""
        if isinstance(command, AddRequest) and command.stream_interval > 1:
            self._interval[command.id] = command.stream_interval
        elif isinstance(command, Abort):
            for id in command.ids:
                self._forget(id)

    def due(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Of outputs that a step gave, and of those held so far, what is to be sent now."""
        return list(self._due(outputs)) if self._interval else list(outputs)

    def _due(self, outputs: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
        for output in outputs:
            interval = self._interval.get(output.id, 1)
            held = self._held.setdefault(output.id, []) if interval > 1 else []
            held.append(output)
            ends, begins = output.finish_reason is not None, output.waited is not None
            if ends or begins or sum(len(one.token_ids) for one in held) >= interval:
                yield from together(held)
                self._held.pop(output.id, None)
            if ends:
                self._forget(output.id)

    def _forget(self, id: str) -> None:
        self._interval.pop(id, None)
        self._held.pop(id, None)


def together(held: list[RequestOutput]) -> list[RequestOutput]:
    """Outputs of one request as one; an error apart, since what was held before it is part of the answer."""
    if len(held) == 1:
        return held
    if held[-1].error is not None:
        return [*together(held[:-1]), held[-1]]
    return [as_one(held)]
