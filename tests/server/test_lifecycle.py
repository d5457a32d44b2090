"""How a server starts, refuses to start, drains, and dies."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.processes import (
    Background,
    closing_terminals,
    eventually,
    folder_of,
    free_port,
    has_ended,
    is_ready,
    ranks_of,
    refusal,
    started,
)
from tests.serving import tiny_config
from tests.tiny import write_model
from turnout.errors import UserError
from turnout.server.launch import ServerProcess, launch
from turnout.server.run import bind


def test_drain_finishes_what_it_can_and_refuses_what_comes(tiny_folder: Path):
    """The engine is held still where the test needs requests to be running, however fast it is."""
    with (
        started(tiny_folder, shutdown_timeout=8.0, watchdog_timeout=60.0) as (server, root),
        httpx.Client(base_url=root, timeout=60) as http,  # made before: that takes long where others compute
    ):
        (engine,) = ranks_of(server)
        endless = Background(root, tokens=500, n=60)  # many times 500 steps, for 16 have pages at the end
        short = Background(root, tokens=8)
        engine.suspend()
        server.process.terminate()
        while http.get("/ready").status_code == 200:
            time.sleep(0.01)
        ready = http.get("/ready")
        refused = http.post("/v1/completions", json={"prompt": "late"})
        assert http.get("/health").status_code == 200
        assert ready.status_code == refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        engine.resume()
        short.result()
        engine.suspend()
        assert short.num_tokens() == 8
        assert endless.error()["code"] == "shutting_down"
        engine.resume()
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_everything_at_once(tiny_folder: Path):
    with started(tiny_folder, shutdown_timeout=100.0, watchdog_timeout=60.0) as (server, root):
        (engine,), folder = ranks_of(server), folder_of(server)
        Background(root, tokens=480, n=8)
        engine.suspend()  # so that there is something to wait for
        server.process.send_signal(signal.SIGINT)
        while httpx.get(f"{root}/ready", timeout=60).status_code == 200:
            time.sleep(0.01)
        server.process.terminate()
        assert server.process.wait(50) == 128 + signal.SIGTERM  # of the 100 s that it may drain
        assert eventually(lambda: has_ended(engine))
        assert eventually(lambda: not folder.exists())


def test_a_terminal_that_closes_lets_answers_finish(tiny_folder: Path):
    """All processes of the command get the signal, twice: from the shell, and from the system."""
    with (
        closing_terminals(signal.SIG_DFL),
        started(tiny_folder, shutdown_timeout=60.0, watchdog_timeout=60.0) as (server, root),
    ):
        (engine,), folder = ranks_of(server), folder_of(server)
        group = [
            psutil.Process(server.process.pid),
            *psutil.Process(server.process.pid).children(recursive=True),
        ]
        answer = Background(root, tokens=300)
        engine.suspend()  # so that it is not complete yet
        for _ in range(2):
            for process in group:
                with suppress(
                    psutil.NoSuchProcess
                ):  # one that still imports ends, and is started when needed
                    process.send_signal(signal.SIGHUP)
            while httpx.get(f"{root}/ready", timeout=60).status_code == 200:
                time.sleep(0.01)
        engine.resume()
        assert answer.num_tokens() == 300
        assert server.process.wait(60) == 0
        assert eventually(lambda: all(has_ended(process) for process in group))
        assert eventually(lambda: not folder.exists())


def holds_signals(pid: int, thread: int) -> bool:
    """Whether this thread leaves SIGTERM to others."""
    status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    (blocked,) = re.findall(r"^SigBlk:\s+(\w+)$", status, flags=re.M)
    return bool(int(blocked, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_rank_that_dies_while_the_server_leaves_is_said_in_one_line(tiny_folder: Path):
    with started(tiny_folder) as (server, _):
        (engine,) = ranks_of(server)
        # The server learns of both at once, in either order. Only its main thread gets the signal.
        process = psutil.Process(server.process.pid)

        def only_the_main_one_gets_it() -> bool:  # but while it starts a process
            threads = [thread.id for thread in process.threads()]
            return [thread for thread in threads if not holds_signals(process.pid, thread)] == [process.pid]

        assert eventually(only_the_main_one_gets_it)
        process.suspend()
        server.process.terminate()
        engine.kill()
        assert eventually(lambda: not psutil.pid_exists(engine.pid))  # and its exit code is told
        process.resume()
        assert server.process.wait(60) == 1
        said = server.last_lines().splitlines()[-1]
        assert said.startswith("error: the engine process was killed by SIGKILL")
        assert "Traceback" not in server.last_lines()


def test_ctrl_c_while_the_ranks_process_starts(tiny_folder: Path):
    """All processes of the command get it, one of which has only begun to import what it needs."""
    for _ in range(5):  # a busy machine may let it import all before it is interrupted
        server = ServerProcess(tiny_config(tiny_folder), show=False, own_group=True)
        try:
            assert eventually(lambda: len(psutil.Process(server.process.pid).children()) > 0)  # noqa: B023
            os.killpg(server.process.pid, signal.SIGINT)
            assert server.process.wait(60) == 0
            if "Qwen3MoeForCausalLM" not in server.last_lines():
                break
        finally:
            server.process.kill()
            server.stop()
    assert server.last_lines() == ""


def test_a_server_that_only_imports_ends_as_drained(tiny_folder: Path):
    """And what it has started with it."""
    server = ServerProcess(tiny_config(tiny_folder), show=False)
    try:
        process = psutil.Process(server.process.pid)
        assert eventually(lambda: len(process.children()) > 0)
        (importing,) = process.children()
        process.terminate()
        assert server.process.wait(60) == 0
        assert eventually(lambda: has_ended(importing), seconds=1)
    finally:
        server.process.kill()
        server.stop()


def test_nohup_keeps_a_server(tiny_folder: Path):
    with closing_terminals(signal.SIG_IGN), started(tiny_folder) as (server, root):
        server.process.send_signal(signal.SIGHUP)
        answer = Background(root, tokens=8)
        assert answer.result()[-1] == "[DONE]"
        assert is_ready(root)


def test_without_request_restarts_a_killed_engine_fails_every_request(tiny_folder: Path):
    with started(tiny_folder, max_request_restarts=0, watchdog_timeout=60.0) as (server, root):
        (engine,) = ranks_of(server)
        streamed = Background(root, tokens=500)
        engine.suspend()  # so that both requests are still running when it dies
        whole: list[httpx.Response] = []
        body = {"prompt": "go on", "max_tokens": 500, "ignore_eos": True}
        thread = threading.Thread(
            target=lambda: whole.append(httpx.post(f"{root}/v1/completions", json=body, timeout=60))
        )
        thread.start()
        assert eventually(
            lambda: httpx.get(f"{root}/server_info", timeout=60).json()["requests"]["active"] == 2
        )
        engine.kill()
        refused = refusal(root, 50)
        assert streamed.error()["type"] == "server_error"
        thread.join(60)
        assert whole[0].status_code == 500
        assert "SIGKILL" in whole[0].json()["error"]["message"]
        assert eventually(lambda: has_ended(engine))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "restarting")
        assert "retry-after" in refused.headers
        assert eventually(lambda: is_ready(root))
        again = httpx.post(f"{root}/v1/completions", json=body | {"max_tokens": 3}, timeout=60)
        assert again.json()["usage"]["completion_tokens"] == 3
        assert httpx.get(f"{root}/server_info", timeout=60).json()["restarts"] == 1
        assert server.stop() == 0
        assert "the engine process was killed by SIGKILL" in server.last_lines()
        assert "Traceback" not in server.last_lines()


def test_a_killed_server_leaves_nothing_behind(tiny_folder: Path):
    """Not even if its rank is stopped, so that it sees nothing. The port can be had at once."""
    with started(tiny_folder) as (server, root):
        (engine,), folder = ranks_of(server), folder_of(server)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        Background(root, tokens=480, n=8)
        others = psutil.Process(server.process.pid).children(recursive=True)
        engine.suspend()
        server.process.kill()
        server.process.wait(60)
        bind("127.0.0.1", httpx.URL(root).port or 0).close()
        assert eventually(lambda: all(has_ended(process) for process in (engine, *others)))
        assert eventually(lambda: not folder.exists())


def test_before_the_model_is_loaded(tiny_folder: Path):
    """The process that ranks are copies of is stopped as soon as it is there, before it has imported all."""
    port = free_port()
    server = ServerProcess(tiny_config(tiny_folder, port=port), show=False)
    try:
        assert eventually(lambda: len(psutil.Process(server.process.pid).children()) > 0)
        for child in psutil.Process(server.process.pid).children():
            child.suspend()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

            def listens() -> bool:
                with suppress(httpx.ConnectError):
                    return http.get("/health").status_code == 200
                return False

            assert eventually(listens)
            ready = http.get("/ready")
            asked = http.post("/v1/completions", json={"prompt": "early"})
            info = http.get("/server_info").json()
        assert ready.status_code == asked.status_code == 503
        assert ready.json()["error"]["code"] == "loading"
        assert info["state"] == info["ranks"][0]["state"] == "loading"
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0  # told to stop while loading: nothing to drain
        assert eventually(lambda: all(has_ended(child) for child in children))
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


def test_too_few_open_files(tiny_folder: Path):
    limited = ["sh", "-c", 'ulimit -n 32; exec "$@"', "sh", sys.executable, "-m", "turnout"]
    run = subprocess.run(
        [*limited, "serve", str(tiny_folder), "--port", "0"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: this process may open 32 files, and a server needs 48")


@pytest.mark.more
def test_connections_beyond_what_files_allow_wait(tiny_folder: Path):
    with started(tiny_folder) as (server, root), ExitStack() as connections:
        pid = server.process.pid
        allowed = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds() + 4, allowed[1]))
        address = root.removeprefix("http://").split(":")
        for _ in range(20):
            connections.enter_context(socket.create_connection((address[0], int(address[1]))))
        assert eventually(lambda: "new connections wait until others close" in server.last_lines())
        time.sleep(2)  # asyncio tries again each second
        assert server.last_lines().count("new connections wait") == 1
        assert "Traceback" not in server.last_lines()
        connections.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, allowed)
        answer = httpx.post(f"{root}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=30)
        assert answer.status_code == 200


def test_a_truncated_checkpoint(tmp_path: Path):
    write_model(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    message = failure(tiny_config(tmp_path))
    assert "error: " in message
    assert "model.safetensors" in message
    assert "Qwen3MoeForCausalLM" not in message  # found before a rank starts and plans
