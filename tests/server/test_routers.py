"""Three servers of the demo behind the routers that people use, under load, one of them killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.server.processes import eventually, free_port, started
from turnout.server.launch import ServerProcess

CLIENTS = 8
REQUESTS = 24  # of each phase
ROUTERS = {"vllm-router": ["--policy", "round_robin"], "sglang-router": ["launch", "--policy", "cache_aware"]}
pytestmark = pytest.mark.more


class Workers:
    """Servers of the demo that both routers have behind them, one after the other."""

    def __init__(self, stack: ExitStack):
        self._stack = stack
        self._servers: list[tuple[ServerProcess, str]] = []

    def running(self) -> list[tuple[ServerProcess, str]]:
        """Three; new ones take the places of those that were killed."""
        demo = {"served_model_name": "demo", "max_total_tokens": 16384}
        self._servers = [one for one in self._servers if one[0].process.poll() is None]
        while len(self._servers) < 3:
            self._servers.append(self._stack.enter_context(started(Path("demo"), **demo)))
        return self._servers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(stack)


@pytest.fixture(params=list(ROUTERS))
def behind(
    request: pytest.FixtureRequest, workers: Workers, tmp_path: Path
) -> Iterator[tuple[str, list[str], list[int]]]:
    """(the router's address, its workers', their processes)."""
    command = shutil.which(request.param, path=str(Path(sys.executable).parent))
    assert command, f"{request.param} is not installed: pip install -e '.[routers]'"
    servers = workers.running()
    roots, port = [root for _, root in servers], free_port()
    words = [
        *(command, *ROUTERS[request.param], "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *roots, "--prometheus-port", str(free_port())),
        *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "10"),
    ]
    with (tmp_path / "router.log").open("wb") as log:
        router = subprocess.Popen(words, stdout=log, stderr=log)
    root = f"http://127.0.0.1:{port}"
    try:
        assert eventually(lambda: serves(root)), (tmp_path / "router.log").read_text()[-3000:]
        yield root, roots, [server.process.pid for server, _ in servers]
    finally:
        router.kill()
        router.wait()


def serves(root: str) -> bool:
    try:
        return ask(root, 0) == 200
    except httpx.HTTPError:
        return False


def ask(root: str, number: int) -> int:
    """The status of one request; whole and streamed ones, of both kinds, take turns."""
    stream, chat = number % 2 == 1, number % 4 >= 2
    text = f"Tom has {number} apples and buys {number % 7} more. How many apples does he have?"
    prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = {"model": "demo", "max_tokens": 12, "temperature": 0, "stream": stream, **prompt}
    route = "/v1/chat/completions" if chat else "/v1/completions"
    answer = httpx.post(root + route, json=body, timeout=60)
    if answer.status_code == 200 and stream:
        assert answer.text.rstrip().endswith("data: [DONE]")
    elif answer.status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] > 0
    return answer.status_code


def statuses(root: str) -> Counter[int]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return Counter(pool.map(lambda number: ask(root, number), range(REQUESTS)))


def generated(root: str) -> float:
    lines = httpx.get(f"{root}/metrics", timeout=60).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("turnout:generation_tokens_total")
    )


def test_requests_pass_a_router_and_go_on_when_a_worker_dies(behind: tuple[str, list[str], list[int]]):
    root, workers, pids = behind
    before = sum(generated(worker) for worker in workers)
    assert statuses(root) == {200: REQUESTS}
    assert sum(generated(worker) for worker in workers) > before
    structured = {
        "model": "demo",
        "messages": [{"role": "user", "content": "yes or no?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes"]}}},
    }
    answer = httpx.post(f"{root}/v1/chat/completions", json=structured, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == '"yes"'
    before = sum(generated(worker) for worker in workers[1:])
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(pids[0])], check=True)
    deadline = time.monotonic() + 60
    while (found := statuses(root)) != {200: REQUESTS}:  # until the router has taken note
        assert time.monotonic() < deadline, found
    assert sum(generated(worker) for worker in workers[1:]) > before
