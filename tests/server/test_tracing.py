"""Traces as a collector receives them over HTTP, and the lines of --log-requests."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.server.processes import Background, eventually, is_ready, ranks_of, started
from turnout.engine.messages import RequestOutput
from turnout.engine.sampling_params import SamplingParams
from turnout.errors import UserError
from turnout.server import tracing
from turnout.server.launch import ServerProcess
from turnout.server.request_log import RequestRecord, SequenceRecord
from turnout.server.tracing import Tracer

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Collector(ThreadingHTTPServer):
    """An OTLP receiver that keeps the spans it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans: list[Span] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in body.resource_spans:
            service = {a.key: a.value.string_value for a in resource.resource.attributes}
            assert service["service.name"] == "turnout"
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        yield collector
        collector.shutdown()


@pytest.fixture(scope="module")
def traced(tiny_folder: Path, collector: Collector) -> Iterator[tuple[ServerProcess, str]]:
    with started(tiny_folder, otlp_traces_endpoint=collector.url, log_requests="full") as both:
        yield both


def complete(root: str, headers: dict[str, str] | None = None, **fields: object) -> dict[str, Any]:
    body = {"prompt": [97, 98, 99], "max_tokens": 5, "ignore_eos": True} | fields
    reply = httpx.post(f"{root}/v1/completions", json=body, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def span_of(collector: Collector, id: str) -> Span:
    def found() -> list[Span]:
        return [span for span in collector.spans if values(span)["gen_ai.request.id"] == id]

    assert eventually(lambda: len(found()) == 1), [values(span) for span in collector.spans]
    return found()[0]


def values(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def events(span: Span) -> list[str]:
    times = [event.time_unix_nano for event in span.events]
    assert times == sorted(times)
    assert all(span.start_time_unix_nano <= time <= span.end_time_unix_nano for time in times)
    return [event.name for event in span.events]


def test_a_span_tells_the_life_of_a_request_in_its_clients_trace(
    collector: Collector, traced: tuple[ServerProcess, str]
):
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    span = span_of(collector, complete(traced[1], headers)["id"])
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, "00f067aa0ba902b7")
    assert (span.name, span.kind) == ("/v1/completions", Span.SPAN_KIND_SERVER)
    assert events(span) == ["queued", "scheduled", "first token", "finished"]
    told = values(span)
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (3, 5)
    assert (told["gen_ai.request.model"], told["turnout.outcome"]) == ("tiny", "length")
    in_engine = told["gen_ai.latency.time_in_queue"] + told["gen_ai.latency.time_in_model_prefill"]
    assert 0 < in_engine <= told["gen_ai.latency.time_to_first_token"] + 1e-3
    assert told["gen_ai.latency.time_to_first_token"] < told["gen_ai.latency.e2e"]


def test_what_a_client_does_not_sample_is_not_sent(collector: Collector, traced: tuple[ServerProcess, str]):
    unsampled = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-00"}
    ids = [complete(traced[1], headers)["id"] for headers in (unsampled, None)]
    span_of(collector, ids[1])
    assert ids[0] not in [values(span)["gen_ai.request.id"] for span in collector.spans]


def test_requests_that_end_otherwise_have_whole_spans(
    collector: Collector, traced: tuple[ServerProcess, str]
):
    """A client that hangs up; ranks that die, so that the request goes on with others."""
    server, root = traced
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "rid": "hangs-up"}
    with httpx.stream("POST", f"{root}/v1/completions", json=body, timeout=60) as reply:
        next(reply.iter_lines())
    span = span_of(collector, "hangs-up")
    assert events(span)[-1] == "aborted"
    assert values(span)["turnout.outcome"] == "abort"
    for _ in range(5):  # a busy machine may let the stream end before its rank is killed
        stream = Background(root, tokens=300)
        ranks_of(server)[0].send_signal(signal.SIGKILL)
        lines = stream.result()
        assert lines[-1] == "[DONE]"
        span = span_of(collector, json.loads(lines[0])["id"])
        if "resumed" in events_unordered(span):
            break
        assert eventually(lambda: is_ready(root))
    assert sorted(events_unordered(span)) == ["finished", "first token", "queued", "resumed", "scheduled"]
    assert values(span)["gen_ai.usage.completion_tokens"] == 300
    assert span.status.code != Status.STATUS_CODE_ERROR


def test_a_span_says_when_a_request_lost_its_pages():
    sequence = SequenceRecord(prompt_ids=[1])
    sequence.note(RequestOutput(id="a", token_ids=[1], waited=(0.1, 0.1)), [1], 10.5)
    last = RequestOutput(id="a", token_ids=[2], finish_reason="length", preempted=[11.0, 12.0])
    sequence.note(last, [2], 13.0)
    sequence.finish_reason = "length"
    record = RequestRecord(
        id="a", model="tiny", sampling=SamplingParams(), arrival=10.0, sequences=[sequence], ended=13.0
    )
    told = sorted(tracing.events(record), key=lambda event: event[2])
    names = ["queued", "scheduled", "first token", "preempted", "preempted", "finished"]
    assert [name for name, _, _ in told] == names
    assert [at for name, _, at in told if name == "preempted"] == [11.0, 12.0]
    assert tracing.attributes(record)["turnout.preemptions"] == 2


def events_unordered(span: Span) -> list[str]:
    return [event.name for event in span.events]


@pytest.mark.parametrize("address", ["localhost:4318", "grpc://localhost:4317", "http://", "x"])
def test_a_wrong_address_is_refused(address: str):
    with pytest.raises(UserError, match="--otlp-traces-endpoint"):
        Tracer(address, "tiny")


def test_requests_are_logged_as_json(traced: tuple[ServerProcess, str]):
    server, root = traced
    answer = complete(root, prompt="abc", n=2, rid="logged")

    def logged() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in server.last_lines().splitlines() if line.startswith("{")]
        return [line for line in lines if line["request_id"] == "logged"]

    assert eventually(lambda: len(logged()) == 1)
    (line,) = logged()
    assert (line["prompts"], line["n"], line["output_tokens"]) == (["abc"] * 2, 2, 10)
    assert line["outputs"] == [choice["text"] for choice in answer["choices"]]
    assert (line["path"], line["outcome"]) == ("/v1/completions", "length")
    assert 0 < line["seconds_to_first_token"] <= line["seconds"]


def test_a_collector_that_is_down_costs_only_its_spans(
    collector: Collector, traced: tuple[ServerProcess, str]
):
    """The last test here: it ends the collector and the server."""
    server, root = traced
    collector.shutdown()
    collector.server_close()
    for _ in range(3):
        complete(root)
    assert eventually(lambda: "traces are dropped" in server.last_lines())
    complete(root)
    server.process.terminate()
    assert eventually(lambda: server.process.poll() is not None)
    assert server.process.returncode == 0
