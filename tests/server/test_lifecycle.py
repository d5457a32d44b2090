"""How a server starts, refuses to start, drains, and dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serving import tiny_config
from tests.tiny import write_model
from turnout.errors import UserError
from turnout.server.launch import ServerProcess, launch
from turnout.server.run import bind


@contextmanager
def started(folder: Path, **fields: Any) -> Iterator[tuple[ServerProcess, str]]:
    """A server of one's own and its root address."""
    server = ServerProcess(tiny_config(folder, **fields), show=False)
    try:
        yield server, server.wait_ready().removesuffix("/v1")
    finally:
        server.process.kill()
        server.stop()


def engine_of(server: ServerProcess) -> psutil.Process:
    (engine,) = psutil.Process(server.process.pid).children()
    return engine


def sockets_of(server: ServerProcess) -> Path:
    """The folder of the sockets between server and engine."""
    listening = psutil.Process(server.process.pid).net_connections("unix")
    (folder,) = {Path(c.laddr).parent for c in listening if "turnout-" in c.laddr}
    return folder


def has_ended(process: psutil.Process, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


class Background(threading.Thread):
    """A streamed request, running when this returns; keeps its data lines, also if the stream breaks."""

    def __init__(self, root: str, tokens: int, n: int = 1):
        super().__init__(daemon=True)
        self.url = f"{root}/v1/completions"
        self.body = {
            "prompt": "go on",
            "max_tokens": tokens,
            "n": n,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,  # makes every token an event
        }
        self.lines: list[str] = []
        self.running = threading.Event()
        self.start()
        assert self.running.wait(20)

    def run(self) -> None:
        with (
            suppress(httpx.RemoteProtocolError, httpx.ReadError),
            httpx.stream("POST", self.url, json=self.body, timeout=60) as reply,
        ):
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    self.lines.append(line.removeprefix("data: "))
                    self.running.set()

    def result(self) -> list[str]:
        self.join(60)
        return self.lines


def test_drain_finishes_what_it_can_and_refuses_what_comes(tiny_folder: Path):
    """The engine is held still where the test needs requests to be running, however fast it is."""
    with started(tiny_folder, shutdown_timeout=4.0) as (server, root):
        engine = engine_of(server)
        endless = Background(root, tokens=500, n=8)
        short = Background(root, tokens=20)
        engine.suspend()
        server.process.terminate()
        while httpx.get(f"{root}/ready").status_code == 200:
            time.sleep(0.01)
        ready = httpx.get(f"{root}/ready")
        refused = httpx.post(f"{root}/v1/completions", json={"prompt": "late"})
        assert httpx.get(f"{root}/health").status_code == 200
        assert ready.status_code == refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        engine.resume()
        lines = short.result()
        engine.suspend()
        assert (len(lines), lines[-1]) == (21, "[DONE]")
        assert json.loads(endless.result()[-1])["error"]["code"] == "shutting_down"
        engine.resume()
        assert server.process.wait(20) == 0


def test_a_second_signal_ends_everything_at_once(tiny_folder: Path):
    with started(tiny_folder, shutdown_timeout=100.0) as (server, root):
        engine, folder = engine_of(server), sockets_of(server)
        Background(root, tokens=480, n=8)
        engine.suspend()  # so that there is something to wait for
        server.process.send_signal(signal.SIGINT)
        while httpx.get(f"{root}/ready").status_code == 200:
            time.sleep(0.01)
        server.process.terminate()
        assert server.process.wait(5) == 128 + signal.SIGTERM
        assert has_ended(engine)
        assert not folder.exists()


def test_a_killed_engine_fails_every_request_and_starts_anew(tiny_folder: Path):
    with started(tiny_folder) as (server, root):
        engine = engine_of(server)
        streamed = Background(root, tokens=500)
        engine.suspend()  # so that both requests are still running when it dies
        whole: list[httpx.Response] = []
        body = {"prompt": "go on", "max_tokens": 500, "ignore_eos": True}
        thread = threading.Thread(
            target=lambda: whole.append(httpx.post(f"{root}/v1/completions", json=body, timeout=60))
        )
        thread.start()
        while httpx.get(f"{root}/server_info").json()["requests"]["active"] < 2:
            time.sleep(0.01)
        engine.kill()
        assert json.loads(streamed.result()[-1])["error"]["type"] == "server_error"
        thread.join(20)
        assert whole[0].status_code == 500
        assert "SIGKILL" in whole[0].json()["error"]["message"]
        assert has_ended(engine)
        refused = httpx.get(f"{root}/ready")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "restarting")
        assert "retry-after" in refused.headers
        deadline = time.monotonic() + 20
        while httpx.get(f"{root}/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        again = httpx.post(f"{root}/v1/completions", json=body | {"max_tokens": 3}, timeout=60)
        assert again.json()["usage"]["completion_tokens"] == 3
        assert httpx.get(f"{root}/server_info").json()["restarts"] == 1
        assert server.stop() == 0
        assert "the engine process was killed by SIGKILL" in server.last_lines()
        assert "Traceback" not in server.last_lines()


def test_a_killed_server_leaves_no_engine_behind(tiny_folder: Path):
    with started(tiny_folder) as (server, root):
        engine, folder = engine_of(server), sockets_of(server)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        Background(root, tokens=480, n=8)
        server.process.kill()
        assert has_ended(engine)
        assert not folder.exists()


def test_before_the_model_is_loaded(tiny_folder: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ServerProcess(tiny_config(tiny_folder, port=port), show=False)
    root = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                assert httpx.get(f"{root}/health").status_code == 200
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        ready = httpx.get(f"{root}/ready")
        asked = httpx.post(f"{root}/v1/completions", json={"prompt": "early"})
        info = httpx.get(f"{root}/server_info").json()
        assert ready.status_code == asked.status_code == 503
        assert ready.json()["error"]["code"] == "loading"
        assert info["state"] == info["ranks"][0]["state"] == "loading"
        engine = engine_of(server)
        assert server.stop() == 0  # told to stop while loading: nothing to drain
        assert has_ended(engine)
    finally:
        server.process.kill()


def failure(config: Any) -> str:
    """The error of a server that does not start, which must be a user's error without traceback."""
    with pytest.raises(UserError) as caught, launch(config, show=False):
        pass
    message = str(caught.value)
    assert "exit code 2" in message
    assert "Traceback" not in message
    return message


def test_a_port_in_use_is_found_before_weights_load(tiny_folder: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = failure(tiny_config(tiny_folder, port=port))
    assert f"cannot listen on 127.0.0.1:{port}" in message
    assert "Qwen3MoeForCausalLM" not in message


def test_an_address_of_another_machine():
    with pytest.raises(UserError, match="give an address of this machine as --host"):
        bind("203.0.113.1", 0)
    with pytest.raises(UserError, match="--host nowhere"):
        bind("nowhere.invalid", 0)


def test_what_cannot_run_is_refused_before_weights_load(tiny_folder: Path):
    message = failure(tiny_config(tiny_folder, moe_runner_backend="nonsense"))
    assert "--moe-runner-backend nonsense" in message
    assert "Remedy: " in message


def test_a_model_that_does_not_exist(tmp_path: Path):
    assert "nowhere" in failure(tiny_config(tmp_path / "nowhere"))


def test_a_truncated_checkpoint(tmp_path: Path):
    write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    message = failure(tiny_config(tmp_path))
    assert "error: " in message
    assert "model.safetensors" in message
