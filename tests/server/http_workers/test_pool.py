"""Servers whose HTTP several processes serve: the same answers, and nothing is lost but what one holds."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.conftest import is_idle
from tests.server.processes import (
    Background,
    eventually,
    has_ended,
    http_workers_of,
    is_ready,
    ranks_of,
    started,
)
from turnout.config import ServerConfig
from turnout.server.http_workers.worker import OTHER_FILES
from turnout.server.launch import ServerProcess
from turnout.server.run import http_processes

PROCESSES = 3


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"device": "cpu", "tp_size": 4, "dp_size": 4}, 1),
        ({"device": "cuda", "tp_size": 4, "dp_size": 1}, 1),
        ({"device": "cuda", "tp_size": 4, "dp_size": 4}, 5),
        ({"device": "cuda", "tp_size": 64, "dp_size": 64}, 16),
        ({"device": "cuda", "tp_size": 4, "dp_size": 4, "api_server_count": 1}, 1),
        ({"device": "cpu", "api_server_count": 3}, 3),
    ],
)
def test_how_many_processes_serve(fields: dict[str, Any], count: int):
    assert http_processes(ServerConfig(**fields)) == count


def clients_of(worker: psutil.Process) -> int:
    return sum(one.status == psutil.CONN_ESTABLISHED for one in worker.net_connections("tcp"))


@pytest.fixture(scope="module")
def own(tiny_folder: Path) -> Iterator[tuple[ServerProcess, str]]:
    with started(tiny_folder, api_server_count=PROCESSES, watchdog_timeout=60.0) as served:
        yield served


@pytest.fixture
def several(own: tuple[ServerProcess, str]) -> tuple[ServerProcess, str]:
    with httpx.Client(base_url=own[1], timeout=60) as http:
        assert eventually(lambda: is_idle(http))
    return own


def answer(root: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1} | fields
    reply = httpx.post(f"{root}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice | {"usage": reply.json()["usage"]["completion_tokens"]}


def metric(root: str, name: str) -> float:
    text = httpx.get(f"{root}/metrics", timeout=60).text
    return sum(float(value) for value in re.findall(rf"^turnout:{name}\{{.*?\}} (\S+)$", text, flags=re.M))


def test_answers_are_those_of_one_process(several: tuple[ServerProcess, str], root: str):
    _, here = several
    prompts = [f"{number} and {number * 7}" for number in range(24)]
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda prompt: answer(here, prompt), prompts))
        wanted = list(pool.map(lambda prompt: answer(root, prompt), prompts))
    for one, other in zip(found, wanted, strict=True):
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
        assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"])


def test_connections_are_divided_evenly(several: tuple[ServerProcess, str]):
    server, root = several
    with ExitStack() as stack:
        for _ in range(4 * PROCESSES):
            stack.enter_context(httpx.Client(base_url=root, timeout=60)).get("/health")
        assert [clients_of(worker) for worker in http_workers_of(server)] == [4] * PROCESSES
    assert eventually(lambda: not any(clients_of(worker) for worker in http_workers_of(server)))


def test_the_head_counts_what_all_processes_observe(several: tuple[ServerProcess, str]):
    _, root = several
    names = ("request_success_total", "time_to_first_token_seconds_count", "generation_tokens_total")
    before = {name: metric(root, name) for name in names}
    streams = [Background(root, tokens=10, n=2) for _ in range(5)]
    assert [stream.num_tokens() for stream in streams] == [20] * 5
    for name, gained in zip(names, (10, 10, 100), strict=True):
        assert eventually(lambda name=name, gained=gained: metric(root, name) == before[name] + gained)
    gaps = "inter_token_latency_seconds_count"
    assert eventually(lambda: metric(root, gaps) >= 90)


def test_what_concerns_the_server_is_answered_by_the_head(several: tuple[ServerProcess, str]):
    server, root = several
    with httpx.Client(base_url=root, timeout=60) as http:
        assert http.get("/server_info").json()["pid"] == server.process.pid
        assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert http.head("/v1/models").status_code == 200
        assert http.post("/reset_prefix_cache").json() == {"status": "ok"}
        assert http.get("/dashboard").headers["content-security-policy"].startswith("default-src 'none'")
        unknown = http.post("/v1/chat/completion", json={}, headers={"X-Request-Id": "mine"})
        assert unknown.status_code == 404
        assert "did you mean /v1/chat/completions?" in unknown.json()["error"]["message"]
        assert unknown.headers.get_list("x-request-id") == ["mine"]
        assert len(unknown.headers.get_list("date")) == 1
        wrong = http.get("/v1/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        with http.stream("GET", "/dashboard/events") as events:
            kinds = [line for line in _first(events.iter_lines(), 12) if line.startswith("event: ")]
        assert kinds[:2] == ["event: about", "event: tick"]
        assert http.get("/load").json()["server_load"] == 0


def _first(lines: Iterator[str], count: int) -> list[str]:
    return [line for line, _ in zip(lines, range(count), strict=False)]


@contextmanager
def asked(root: str, engine: psutil.Process, count: int) -> Iterator[list[Future[httpx.Response]]]:
    """Requests that have come to the server, which cannot answer them before the block ends: its engine
    stands still."""
    body = {"prompt": "go on", "max_tokens": 40, "ignore_eos": True}
    engine.suspend()
    with ThreadPoolExecutor(count) as pool:
        try:
            yield [
                pool.submit(httpx.post, f"{root}/v1/completions", json=body, timeout=120)
                for _ in range(count)
            ]
        finally:
            with suppress(psutil.NoSuchProcess):
                engine.resume()


def load_of(root: str) -> int:
    return httpx.get(f"{root}/load", timeout=60).json()["server_load"]


def tokens_of(reply: httpx.Response) -> int:
    assert reply.status_code == 200, reply.text
    return reply.json()["usage"]["completion_tokens"]


def code_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def test_a_client_that_leaves_frees_what_it_had(several: tuple[ServerProcess, str]):
    server, root = several
    (engine,) = ranks_of(server)
    body = json.dumps({"prompt": "go on", "max_tokens": 480, "stream": True, "n": 4}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    url = httpx.URL(root)
    with asked(root, engine, 1) as (other,), socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(head.encode() + body)
        assert eventually(lambda: load_of(root) == 2)
        connection.close()
        assert eventually(lambda: load_of(root) == 1)
    assert tokens_of(other.result()) == 40
    with httpx.Client(base_url=root, timeout=60) as http:
        assert eventually(lambda: is_idle(http))


def test_a_process_that_dies_takes_its_own_requests_only(several: tuple[ServerProcess, str]):
    server, root = several
    (engine,) = ranks_of(server)
    workers, count = http_workers_of(server), 4 * PROCESSES
    with asked(root, engine, count) as requests:
        assert eventually(lambda: load_of(root) == count)
        workers[0].kill()
        assert eventually(lambda: load_of(root) < count)
        left = load_of(root)
        assert all(is_ready(root) for _ in range(2 * PROCESSES))  # the others serve meanwhile
        assert eventually(lambda: len(set(http_workers_of(server)) - {workers[0]}) == PROCESSES)
    broken = [one.exception() for one in requests]
    assert sum(isinstance(error, httpx.TransportError) for error in broken) == count - left
    whole = [one.result() for one, error in zip(requests, broken, strict=True) if error is None]
    assert [tokens_of(reply) for reply in whole] == [40] * left
    with httpx.Client(base_url=root, timeout=60) as http:
        assert eventually(lambda: is_idle(http))  # what no client waits for was aborted
    with ThreadPoolExecutor(12) as pool:
        found = pool.map(lambda number: answer(root, f"{number}", ignore_eos=True), range(12))
        assert [one["usage"] for one in found] == [12] * 12


def test_ranks_that_restart_lose_no_request(tiny_folder: Path):
    with started(tiny_folder, api_server_count=2, watchdog_timeout=60.0) as (server, root):
        (engine,) = ranks_of(server)
        streams = [Background(root, tokens=150, n=2) for _ in range(2)]
        with asked(root, engine, 4) as requests:
            assert eventually(lambda: load_of(root) >= 4)
            engine.kill()
            assert [tokens_of(one.result()) for one in requests] == [40] * 4
        assert [stream.num_tokens() for stream in streams] == [300] * 2
        assert httpx.get(f"{root}/server_info", timeout=60).json()["restarts"] == 1


def test_requests_that_ranks_take_with_them_end_with_the_reason(tiny_folder: Path):
    fields = {"api_server_count": 2, "max_request_restarts": 0, "watchdog_timeout": 60.0}
    with started(tiny_folder, **fields) as (server, root):
        (engine,) = ranks_of(server)
        with asked(root, engine, 4) as requests:
            assert eventually(lambda: load_of(root) == 4)
            engine.kill()
            assert {code_of(one.result()) for one in requests} == {(500, "engine_failed")}
        assert eventually(lambda: is_ready(root))
        assert answer(root, "again", ignore_eos=True)["usage"] == 12


def test_more_than_may_wait_is_refused(tiny_folder: Path):
    """Also where requests come to several processes at once."""
    fields = {"max_running_requests": 2, "max_queued_requests": 2}
    with started(tiny_folder, api_server_count=2, watchdog_timeout=60.0, **fields) as (server, root):
        (engine,) = ranks_of(server)
        body = {"prompt": "busy", "max_tokens": 12, "ignore_eos": True}

        def ask() -> httpx.Response:
            return httpx.post(f"{root}/v1/completions", json=body, timeout=60)

        engine.suspend()
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(ask) for _ in range(12)]
            assert eventually(lambda: sum(one.done() for one in asked) == 8)
            refused = [one.result() for one in asked if one.done()]
            assert {reply.status_code for reply in refused} == {503}
            assert {reply.json()["error"]["code"] for reply in refused} == {"queue_full"}
            engine.resume()
            assert sorted(one.result().status_code for one in asked) == [200] * 4 + [503] * 8
            assert [ask().status_code for _ in range(4)] == [200] * 4  # nothing remains reserved


def test_drain_finishes_what_runs_and_refuses_what_comes(tiny_folder: Path):
    with (
        started(tiny_folder, api_server_count=2, shutdown_timeout=100.0, watchdog_timeout=60.0) as own,
        httpx.Client(base_url=own[1], timeout=60) as http,
    ):
        server, root = own
        (engine,), workers = ranks_of(server), http_workers_of(server)
        with asked(root, engine, 4) as requests:
            assert eventually(lambda: load_of(root) == 4)
            server.process.terminate()
            assert eventually(lambda: http.get("/ready").status_code == 503)
            assert code_of(http.post("/v1/completions", json={"prompt": "late"})) == (503, "shutting_down")
        assert [tokens_of(one.result()) for one in requests] == [40] * 4
        assert server.process.wait(60) == 0
        assert all(has_ended(worker) for worker in workers)


def test_drain_cuts_off_what_takes_too_long(tiny_folder: Path):
    fields = {"api_server_count": 2, "shutdown_timeout": 1.0, "watchdog_timeout": 60.0}
    with started(tiny_folder, **fields) as (server, root):
        (engine,) = ranks_of(server)
        with asked(root, engine, 4) as requests:
            assert eventually(lambda: load_of(root) == 4)
            server.process.terminate()
            assert {code_of(one.result()) for one in requests} == {(503, "shutting_down")}
        assert server.process.wait(60) == 0


@pytest.mark.parametrize("ending", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.more)])
def test_no_process_outlives_the_head(tiny_folder: Path, ending: signal.Signals):
    with started(tiny_folder, api_server_count=2) as (server, _):
        children = psutil.Process(server.process.pid).children(recursive=True)
        sockets = psutil.Process(server.process.pid).net_connections("unix")
        folder = next(Path(one.laddr).parent for one in sockets if "turnout_http_" in one.laddr)
        server.process.send_signal(ending)
        assert eventually(lambda: all(has_ended(child) for child in children))
        assert eventually(lambda: not folder.exists())


@pytest.mark.more
def test_a_server_may_be_stopped_while_a_process_is_started_again(tiny_folder: Path):
    with started(tiny_folder, api_server_count=2) as (server, _):
        children = psutil.Process(server.process.pid).children(recursive=True)
        http_workers_of(server)[0].kill()
        server.process.terminate()
        assert server.process.wait(20) == 0
        assert eventually(lambda: all(has_ended(child) for child in children))


def test_connections_beyond_what_files_allow_wait(tiny_folder: Path):
    with started(tiny_folder, api_server_count=2) as (server, root), ExitStack() as connections:
        workers, url = http_workers_of(server), httpx.URL(root)
        for worker in workers:
            worker.rlimit(psutil.RLIMIT_NOFILE, (OTHER_FILES + 10, worker.rlimit(psutil.RLIMIT_NOFILE)[1]))
        for _ in range(30):
            connections.enter_context(socket.create_connection((url.host, url.port)))
        assert eventually(lambda: [clients_of(worker) for worker in workers] == [10, 10])
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(answer, root, "wait", ignore_eos=True) for _ in range(4)]
            time.sleep(0.5)
            assert not any(one.done() for one in waiting)
            assert [clients_of(worker) for worker in workers] == [10, 10]
            connections.close()
            assert [one.result()["usage"] for one in waiting] == [12] * 4
        assert "Traceback" not in server.last_lines()


def test_a_key_is_asked_for_by_every_process(tiny_folder: Path):
    with started(tiny_folder, api_server_count=2, api_key="secret") as (_, root):
        for _ in range(4):  # two for each
            for method, path in (("POST", "/v1/completions"), ("GET", "/server_info"), ("POST", "/restart")):
                assert httpx.request(method, f"{root}{path}", timeout=60).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{root}/server_info", headers=headers, timeout=60).status_code == 200
        assert httpx.get(f"{root}/ready", timeout=60).status_code == 200
