"""The description of the interface is true: valid, complete, and schemathesis finds nothing against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import schemathesis

from turnout.config import ServerConfig
from turnout.server.api.app import create_app
from turnout.server.api.control import Control
from turnout.server.api.openapi import PROBES, describe
from turnout.server.api.service import Service
from turnout.server.supervise.engine import EngineSupervisor

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("with_key", [False, True])
def test_the_description_is_valid_openapi(with_key: bool):
    schemathesis.openapi.from_dict(describe(with_key=with_key)).validate()


def test_every_route_is_described():
    config = ServerConfig()
    engine = EngineSupervisor(config)
    app = create_app(Control(Service(config, engine), engine))
    routes: dict[str, set[str]] = {}
    for route in app.routes:
        path, methods = route.path.replace(":path}", "}"), {method.lower() for method in route.methods}
        routes[path] = routes.get(path, set()) | (methods - {"head"})
    assert routes == {path: item.keys() for path, item in describe(with_key=False)["paths"].items()}


def test_a_key_is_described_where_it_is_wanted():
    document = describe(with_key=True)
    for path, item in document["paths"].items():
        for operation in item.values():
            assert ("security" in operation) is ("401" in operation["responses"]) is (path not in PROBES)
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert "securitySchemes" not in describe(with_key=False)["components"]


def test_the_server_publishes_it(http: httpx.Client):
    assert http.get("/openapi.json").json() == json.loads(json.dumps(describe(with_key=False)))


@pytest.mark.more
def test_schemathesis_finds_nothing(root: str, tmp_path: Path):
    """Bodies that the description allows are served, others refused; answers and events have its shapes."""
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis as run; run()"),
        *("run", f"{root}/openapi.json", "--seed", "1", "--no-color"),
        # A limit in time would leave out on a busy machine what comes last.
        *("--phases", "coverage,fuzzing", "--max-examples", "2", "--continue-on-failure"),
        # Which refusals of allowed bodies are right is said in the hooks.
        *("--exclude-checks", "positive_data_acceptance", "--output-sanitize", "false"),
        *("--report", "json", "--report-json-path", str(report)),
    ]
    settings = {"SCHEMATHESIS_HOOKS": "tests.server.api.schemathesis_hooks", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(report.read_text())
    assert (told["stop_reason"], told["errors"]) == ("completed", [])
    operations = told["operations"]
    assert operations["total"] == len(describe(with_key=False)["paths"]) - 1  # not the description itself
    assert operations["tested"] == operations["total"]
    assert operations["errored"] == operations["skipped"] == 0
