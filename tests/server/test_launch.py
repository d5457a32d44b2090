"""The launcher hands every field over, and a server started by it is the server that was asked for."""

from __future__ import annotations

import dataclasses

import httpx
from typer.testing import CliRunner

import turnout.server.run
from turnout.cli import app
from turnout.config import Config, ServerConfig
from turnout.server.launch import arguments, environment


def test_every_field_survives_the_command_line(monkeypatch):
    """Each field differs from its default, and the command line gives the same configuration back."""
    changed = {}
    for field in dataclasses.fields(ServerConfig):
        choices = field.metadata["choices"]
        if field.type == "bool":
            changed[field.name] = not field.default
        elif choices:
            changed[field.name] = choices[-1]
        elif field.type == "str":
            changed[field.name] = f"some {field.name}"
        else:
            maximum = field.metadata["max"]
            changed[field.name] = field.default + 1 if maximum != 1 else 0.5
    config = ServerConfig(**changed)
    served = []
    monkeypatch.setattr(turnout.server.run, "serve", lambda config: served.append(config) or 0)
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


def test_a_plain_configuration_is_served_on_a_free_port(monkeypatch):
    from turnout.server import launch as module

    class Recorded(module.ServerProcess):
        def __init__(self, config: ServerConfig, *, show: bool):
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


def test_the_shared_server_was_launched_as_asked(http: httpx.Client):
    config = http.get("/server_info").json()["config"]
    assert config["served_model_name"] == "tiny"
    assert config["max_total_tokens"] == 8192
    assert config["load_progress"] is True
