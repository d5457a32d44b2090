"""The launcher hands every field over, and a server started by it is the server that was asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import httpx
import psutil
import pytest
from typer.testing import CliRunner

import turnout.commands.serve
from tests.server.processes import eventually, has_ended
from turnout.cli import app
from turnout.config import Config, ServerConfig
from turnout.errors import UserError
from turnout.server.launch import announced, arguments, environment, launch
from turnout.server.run import READY


@pytest.mark.parametrize("before", ["", "(_Host pid=7) started in 0.2 s"])
def test_the_line_that_announces_the_server(before: str):
    """Ray's threads print a line and its end one after the other, and ours may come between."""
    assert announced(f"{before}{READY}http://127.0.0.1:8000/v1") == "http://127.0.0.1:8000/v1"
    assert announced(f"{before}loading") is None


def test_every_field_survives_the_command_line(monkeypatch):
    """Each field differs from its default, and the command line gives the same configuration back."""
    changed = {}
    for field in dataclasses.fields(ServerConfig):
        choices = field.metadata["choices"]
        if field.type in ("bool", "bool | None"):
            changed[field.name] = not field.default
        elif choices:
            changed[field.name] = choices[-1]
        elif field.type in ("str", "str | None"):
            changed[field.name] = f"some-{field.name}"
        else:
            maximum = field.metadata["max"]
            changed[field.name] = field.default + 1 if maximum != 1 else 0.5
    config = ServerConfig(**changed)
    served = []
    monkeypatch.setattr(turnout.commands.serve, "serve", lambda config: served.append(config) or 0)
    for name, value in environment(config).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TURNOUT_PORT", "1")
    result = CliRunner().invoke(app, ["serve", config.model, *arguments(config)])
    assert result.exit_code == 0, result.output
    assert served == [config]


def test_the_key_is_not_an_argument():
    config = ServerConfig(api_key="s3cret")
    assert "s3cret" not in arguments(config)
    assert environment(config)["TURNOUT_API_KEY"] == "s3cret"


def test_the_key_of_the_configuration_counts_not_the_environments(monkeypatch):
    monkeypatch.setenv("TURNOUT_API_KEY", "another")
    assert environment(ServerConfig(api_key="s3cret"))["TURNOUT_API_KEY"] == "s3cret"
    assert "TURNOUT_API_KEY" not in environment(ServerConfig())


def test_a_plain_configuration_is_served_on_a_free_port(monkeypatch):
    from turnout.server import launch as module

    class Recorded(module.ServerProcess):
        def __init__(self, config: ServerConfig, *, show: bool, own_group: bool):
            recorded.append(config)

        def wait_ready(self) -> str:
            return "http://somewhere/v1"

        def stop(self) -> int:
            return 0

    recorded: list[ServerConfig] = []
    monkeypatch.setattr(module, "ServerProcess", Recorded)
    with module.launch(Config(model="some", page_size=32)) as url:
        assert url == "http://somewhere/v1"
    assert recorded == [ServerConfig(model="some", page_size=32, port=0)]


@pytest.mark.more
def test_progress_on_a_terminal_that_does_not_know_its_width(tiny_folder: Path):
    """The launcher passes the bars on, and finds the server's address between them."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    program = (
        "from turnout.config import ServerConfig\n"
        "from turnout.server.launch import launch\n"
        f"config = ServerConfig(model={str(tiny_folder)!r}, device='cpu', port=0, max_total_tokens=512)\n"
        "with launch(config) as url: print('address', url)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while chunk := os.read(master, 4096):
            shown += chunk
    os.close(master)
    out, _ = launcher.communicate(timeout=60)
    assert out.startswith(b"address http://127.0.0.1:"), shown.decode()
    assert b"Turnout is ready at" in shown
    assert b"loading layers" in shown


def test_the_shared_server_was_launched_as_asked(http: httpx.Client):
    config = http.get("/server_info").json()["config"]
    assert config["served_model_name"] == "tiny"
    assert config["max_total_tokens"] == 8192
    assert config["load_progress"] is True


def test_the_server_ends_when_what_launched_it_is_killed(tiny_folder: Path):
    """Which has no time to tell it so."""
    code = (
        "import sys, time\n"
        "from tests.serving import tiny_config\n"
        "from turnout.server.launch import launch\n"
        "with launch(tiny_config(sys.argv[1]), show=False) as url:\n"
        "    print(url, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tiny_folder)], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        try:
            url = launcher.stdout.readline().strip()
            assert httpx.get(f"{url}/models", timeout=60).status_code == 200
            server, *others = psutil.Process(launcher.pid).children(recursive=True)
        finally:
            launcher.kill()
    try:
        assert eventually(lambda: all(has_ended(process) for process in (server, *others)))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            server.kill()


def test_why_a_server_did_not_start_is_said_once(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(UserError) as refused, launch(Config(model="/nowhere", device="cpu")):
        pass
    sys.stderr.write(f"error: {refused.value}\n")
    assert capfd.readouterr().err.count("no model '/nowhere'") == 1
