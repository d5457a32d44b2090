"""OpenTelemetry traces: a span for each request, sent over HTTP to a collector (extra `turnout[otel]`).

Spans are made in the server process when a request has ended, from times that were taken anyway, so that no
step pays for them. What a collector that is down misses is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from turnout import __version__
from turnout.errors import UserError
from turnout.server.request_log import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SECONDS_TO_SEND = 2.0  # a batch of spans, retries included; also what leaving waits for
PATH = "/v1/traces"
log = logging.getLogger("turnout.server")


class Tracer:
    """Raises UserError where the packages are missing or `endpoint` is no address."""

    def __init__(self, endpoint: str, model: str):
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"--otlp-traces-endpoint {endpoint}: must be the address of an OTLP collector over HTTP, "
                "e.g. http://localhost:4318/v1/traces"
            )
        self._provider = _provider(endpoint if parts.path.strip("/") else endpoint.rstrip("/") + PATH, model)
        self._tracer = self._provider.get_tracer("turnout", __version__)

    def observe(self, record: RequestRecord) -> None:
        """Make the span of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(
            record.path or "generate",
            context=TraceContextTextMapPropagator().extract({"traceparent": record.traceparent}),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(record.arrival),
            attributes=attributes(record),
        )
        for name, choice, at in events(record):
            span.add_event(name, {"choice": choice}, _nanoseconds(at))
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(_nanoseconds(record.ended))

    def close(self) -> None:
        """Send what is left; takes no longer than SECONDS_TO_SEND."""
        self._provider.shutdown()


def attributes(record: RequestRecord) -> dict[str, Any]:
    """Under the names that vLLM and SGLang use; latencies are the first choice's."""
    first, sampling = record.sequences[0], record.sampling
    found: dict[str, Any] = {
        "gen_ai.request.id": record.id,
        "gen_ai.request.model": record.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": len(record.sequences),
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "gen_ai.latency.e2e": record.ended - record.arrival,
        "turnout.outcome": record.outcome,
        "turnout.cached_prompt_tokens": sum(sequence.cached_tokens for sequence in record.sequences),
        "turnout.preemptions": sum(len(sequence.preempted) for sequence in record.sequences),
        "turnout.resumptions": sum(len(sequence.resumed) for sequence in record.sequences),
    }
    if first.waited is not None:
        found["gen_ai.latency.time_in_queue"], found["gen_ai.latency.time_in_model_prefill"] = first.waited
    if first.first_token is not None and first.last_token is not None:
        found["gen_ai.latency.time_to_first_token"] = first.first_token - record.arrival
        found["gen_ai.latency.time_in_model_decode"] = first.last_token - first.first_token
    return found


def events(record: RequestRecord) -> Iterator[tuple[str, int, float]]:
    """(what happened, to which choice, when)."""
    for choice, sequence in enumerate(record.sequences):
        yield "queued", choice, record.arrival
        if sequence.waited is not None:
            yield "scheduled", choice, record.arrival + sequence.waited[0]
        if sequence.first_token is not None:
            yield "first token", choice, sequence.first_token
        for at in sequence.resumed:
            yield "resumed", choice, at
        for at in sequence.preempted:
            yield "preempted", choice, at
        finished = sequence.finish_reason in ("stop", "length")
        yield "finished" if finished else "aborted", choice, sequence.last_token or record.ended


def _provider(endpoint: str, model: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    except ImportError as error:
        raise UserError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'turnout[otel]'"
        ) from None

    class Patient(SpanExporter):
        """Says once that the collector does not answer, and once that it does again."""

        def __init__(self) -> None:
            self._send = OTLPSpanExporter(endpoint=endpoint, timeout=SECONDS_TO_SEND)
            self._down = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = self._send.export(spans)
            down = result != SpanExportResult.SUCCESS
            if down and not self._down:
                log.warning("traces are dropped: %s does not take them; serving goes on", endpoint)
            elif self._down and not down:
                log.info("traces are taken again by %s", endpoint)
            self._down = down
            return result

        def shutdown(self) -> None:
            self._send.shutdown()

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it repeats itself for every batch
    provider = TracerProvider(
        resource=Resource.create(
            {"service.name": "turnout", "service.version": __version__, "turnout.model": model}
        )
    )
    provider.add_span_processor(BatchSpanProcessor(Patient(), schedule_delay_millis=1000))
    return provider


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
