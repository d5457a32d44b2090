"""`bench serve` against a real server, its formulas against hand-made streams, and its refusals."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from turnout.bench import serve
from turnout.bench.serve import ServeBench, Trace, measure
from turnout.cli import app
from turnout.errors import UserError

LATENCIES = [
    f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median", "p99")
]
PROVENANCE = {
    "benchmark", "device", "devices", "driver", "processor", "vector_flags", "bf16_units", "versions", "date",
    "commit", "command", "ceilings", "rows"
}  # fmt: skip


def test_a_real_server_is_measured(base_url, tmp_path):
    out = tmp_path / "new" / "serve.json"
    command = [sys.executable, "-m", "turnout", "bench", "serve", "--base-url", base_url]
    command += ["--num-prompts", "12", "--random-input-len", "9", "--random-output-len", "7"]
    command += ["--max-concurrency", "5", "--output", str(out)]
    before = os.times().children_user
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    used = os.times().children_user - before
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert set(content) == PROVENANCE
    assert content["benchmark"] == "serve"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert "bench serve --base-url" in content["command"]
    assert {"python", "torch", "transformers"} <= set(content["versions"])
    [row] = content["rows"]
    assert row["output_tokens"] == 12 * 7  # --ignore-eos: always the full length
    assert row["request_throughput"] == pytest.approx(12 / row["duration_s"])
    assert row["output_throughput"] == pytest.approx(12 * 7 / row["duration_s"])
    for name in LATENCIES:
        assert row[name] > 0, name
    assert row["mean_ttft_ms"] < row["mean_e2el_ms"] < 1000 * row["duration_s"]
    assert 0 < row["client_busy"] * row["duration_s"] < used  # which has its start as well
    assert "output_throughput" in done.stdout


def test_prompts_are_drawn_from_the_seed():
    bench = ServeBench(num_prompts=3, input_len=5, seed=1)
    assert bench.prompts() == bench.prompts()
    assert bench.prompts() != ServeBench(num_prompts=3, input_len=5, seed=2).prompts()
    assert [len(prompt) for prompt in bench.prompts()] == [5, 5, 5]


def test_a_row_follows_from_its_traces(monkeypatch):
    traces = [
        Trace(ttft=0.5, latency=2.5, gaps=[0.25, 0.75, 1.0], tokens=5),
        Trace(ttft=0.1, latency=0.4, gaps=[0.1, 0.2], tokens=3),
        Trace(ttft=0.3, latency=0.3, gaps=[], tokens=1),
    ]

    async def load(*_: object) -> tuple[list[Trace], float, float]:
        return traces, 4.5, 0.9

    monkeypatch.setattr(serve, "_load", load)
    row = measure(ServeBench(num_prompts=3), "")
    tpot = [(2.5 - 0.5) / 4 * 1000, (0.4 - 0.1) / 2 * 1000]  # one token has no time per further token
    itl = [100, 200, 250, 750, 1000]
    assert row["mean_tpot_ms"] == pytest.approx(statistics.mean(tpot))
    assert row["median_itl_ms"] == pytest.approx(250)
    assert row["mean_itl_ms"] == pytest.approx(statistics.mean(itl))
    assert row["p99_itl_ms"] == pytest.approx(1000)
    assert row["mean_ttft_ms"] == pytest.approx(300)
    assert row["median_e2el_ms"] == pytest.approx(400)
    assert row["p99_e2el_ms"] == pytest.approx(2500)
    assert row["output_tokens"] == 9
    assert row["output_throughput"] == pytest.approx(9 / 4.5)
    assert row["client_busy"] == pytest.approx(0.2)


@contextmanager
def slept(seconds: float) -> Iterator[None]:
    """Before an event."""
    time.sleep(seconds)
    yield


class Clock:
    """The client's time, which passes before an event only; the next one waits until it has seen that."""

    def __init__(self) -> None:
        self.now, self._looks = 0.0, 0
        self._looked = threading.Condition()

    def __call__(self) -> float:
        with self._looked:
            self._looks += 1
            self._looked.notify_all()
            return self.now

    @contextmanager
    def passed(self, seconds: float) -> Iterator[None]:
        with self._looked:
            self.now += seconds
            before = self._looks
        yield
        with self._looked:
            assert self._looked.wait_for(lambda: self._looks > before, 60)


class Scripted(BaseHTTPRequestHandler):
    """Streams three tokens: the first after 0.2 s, the others 0.1 s apart, then 0.1 s of nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.server.keys.add(self.headers["Authorization"])
        self._start()
        self.wfile.write(b'{"data": [{"id": "scripted"}]}')

    def do_POST(self) -> None:
        self.server.keys.add(self.headers["Authorization"])
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._start()
        for wait, event in (
            (0.2, {"choices": [{"text": self.server.first}]}),
            (0.1, {"choices": [{"text": "b"}]}),
            (0.1, {"choices": [{"text": "c"}]}),
            (0.1, {"choices": [], "usage": {"completion_tokens": 3}}),
        ):
            with self.server.passed(wait):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _start(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def scripted():
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        server.bodies, server.keys, server.first, server.passed = [], set(), "a", slept
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("first", ["a", ""], ids=["text", "part of a character"])
def test_times_are_those_of_the_stream(first, scripted, monkeypatch):
    scripted.first, clock = first, Clock()
    scripted.passed = clock.passed
    monkeypatch.setattr(serve, "time", SimpleNamespace(perf_counter=clock, process_time=time.process_time))
    url = f"http://127.0.0.1:{scripted.server_port}/v1"
    row = measure(ServeBench(num_prompts=2, max_concurrency=1, ignore_eos=False, input_len=4), url)
    found = [row[f"median_{name}_ms"] for name in ("ttft", "itl", "e2el", "tpot")]
    assert found == pytest.approx([200, 100, 500, 150])
    assert row["duration_s"] == pytest.approx(1.0)  # one after the other
    assert row["output_tokens"] == 6
    for body in scripted.bodies:
        assert len(body["prompt"]) == 4
        assert body["max_tokens"] == 64
        assert "ignore_eos" not in body


def test_a_key_goes_along_with_every_request(scripted):
    words = ["bench", "serve", "--base-url", f"http://127.0.0.1:{scripted.server_port}/v1"]
    words += ["--num-prompts", "1", "--random-input-len", "4"]
    assert CliRunner().invoke(app, [*words, "--api-key", "secret"]).exit_code == 0
    assert scripted.keys == {"Bearer secret"}


def test_requests_are_spread_at_the_rate_asked_for(scripted):
    url = f"http://127.0.0.1:{scripted.server_port}/v1"
    row = measure(ServeBench(num_prompts=5, request_rate=5.0, max_concurrency=5, seed=0), url)
    assert row["request_rate"] == 5.0
    assert row["duration_s"] > 0.7  # all at once would take half a second


def test_a_server_that_hangs_up(scripted):
    url = f"http://127.0.0.1:{scripted.server_port}/v1"
    scripted.RequestHandlerClass = type("HangUp", (Scripted,), {"do_POST": lambda handler: None})
    with pytest.raises(UserError, match="a request failed"):
        measure(ServeBench(num_prompts=1), url)


def test_a_stream_that_ends_with_an_error(scripted):
    """As where the logits of a request are not finite, after tokens were sent."""

    def failing(handler: Scripted) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler._start()
        for event in {"choices": [{"text": "a"}]}, {"error": {"message": "the rank is gone", "code": 500}}:
            handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    scripted.RequestHandlerClass = type("Failing", (Scripted,), {"do_POST": failing})
    with pytest.raises(UserError, match=r"a request failed .the rank is gone"):
        measure(ServeBench(num_prompts=1), f"http://127.0.0.1:{scripted.server_port}/v1")


def test_refusals_of_the_server_are_shown(base_url):
    with pytest.raises(UserError, match="HTTP 400"):
        measure(ServeBench(output_len=100_000), base_url)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either MODEL or --base-url"),
        (["demo", "--base-url", "http://x"], "either MODEL or --base-url"),
        (["demo", "--dataset-name", "sharegpt"], "only `random` is known"),
        (["demo", "--num-prompts", "0"], "--num-prompts 0: must be at least 1"),
        (["demo", "--request-rate", "0"], "--request-rate 0.0: must be positive"),
        (["demo", "--request-rate", "nan"], "--request-rate nan: must be positive"),
        (["demo", "--output", "/proc/x/serve.json"], "--output /proc/x/serve.json: cannot be written"),
        (["demo", "--output", "/tmp"], "--output /tmp: cannot be written (Is a directory)"),
        (["--base-url", "http://127.0.0.1:9/v1"], "no OpenAI-compatible server answers"),
    ],
)
def test_user_errors(words, message):
    done = CliRunner().invoke(app, ["bench", "serve", *words])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)
