"""What became of each request, once it has its answer or its client has left: for logs and traces."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from turnout.engine.messages import RequestOutput
from turnout.engine.sampling_params import SamplingParams

log = logging.getLogger("turnout.requests")


@dataclass(kw_only=True)
class SequenceRecord:
    """One choice of a request. Times are time.time(), durations seconds."""

    prompt_ids: Sequence[int]
    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    waited: tuple[float, float] | None = None  # in the queue, and from there to the first token
    first_token: float | None = None
    last_token: float | None = None
    resumed: list[float] = field(default_factory=list)  # when the first token came from other ranks
    preempted: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def note(self, output: RequestOutput, token_ids: Sequence[int], now: float) -> None:
        """Add what came of the sequence. token_ids: those of `output` that belong to the answer."""
        if output.waited is not None and self.waited is not None:
            self.resumed.append(now)
        self.waited = self.waited or output.waited
        self.cached_tokens = self.cached_tokens or output.cached_tokens
        self.preempted += output.preempted
        if token_ids:
            self.output_ids += token_ids
            self.first_token, self.last_token = self.first_token or now, now


@dataclass(kw_only=True)
class RequestRecord:
    """path, traceparent: of the HTTP request. error: that ended it."""

    id: str
    model: str
    sampling: SamplingParams
    arrival: float
    sequences: list[SequenceRecord]
    path: str = ""
    traceparent: str = ""
    ended: float = 0.0
    error: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(sequence.prompt_ids) for sequence in self.sequences)

    @property
    def output_tokens(self) -> int:
        return sum(len(sequence.output_ids) for sequence in self.sequences)

    @property
    def outcome(self) -> str:
        """Why the request ended: error, abort, or its sequences' reasons."""
        if self.error is not None:
            return "error"
        return ",".join(sorted({sequence.finish_reason or "abort" for sequence in self.sequences}))


Observer = Callable[[RequestRecord], None]


@dataclass(frozen=True)
class Incoming:
    path: str = ""
    traceparent: str = ""


INCOMING: ContextVar[Incoming | None] = ContextVar("incoming", default=None)


class NoteIncoming:
    """ASGI middleware: what a record keeps of the HTTP request, for whatever handles it."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
            INCOMING.set(Incoming(scope["path"], given.decode("latin-1")))
        await self._app(scope, receive, send)


def log_requests(decode: Callable[[Sequence[int]], str] | None) -> Observer:
    """An observer that writes a line of JSON for each request; with `decode` also its texts."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.INFO)

    def write(record: RequestRecord) -> None:
        log.info(json.dumps(describe(record, decode), ensure_ascii=False))

    return write


def describe(record: RequestRecord, decode: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """A record as plain values."""
    line: dict[str, Any] = {
        "time": record.arrival,
        "request_id": record.id,
        "path": record.path,
        "model": record.model,
        "outcome": record.outcome,
        "error": record.error,
        "seconds": round(record.ended - record.arrival, 6),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "max_tokens": record.sampling.max_tokens,
        "temperature": record.sampling.temperature,
        "top_p": record.sampling.top_p,
        "n": len(record.sequences),
    }
    first = min((s.first_token for s in record.sequences if s.first_token), default=None)
    if first is not None:
        line["seconds_to_first_token"] = round(first - record.arrival, 6)
    if decode is not None:
        line["prompts"] = [decode(sequence.prompt_ids) for sequence in record.sequences]
        line["outputs"] = [decode(sequence.output_ids) for sequence in record.sequences]
    return line
