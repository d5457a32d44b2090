"""Turnout behind Ray Serve on a local cluster: answers, streams and errors are those of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.processes import eventually, free_port
from tests.serving import tiny_config

pytestmark = pytest.mark.more
BODY = {"prompt": "pears and plums", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def deployed(tiny_folder: Path) -> Iterator[str]:
    import ray
    from ray import serve

    from turnout.integrations.ray_serve import application

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else 15: replicas wait for whatever else runs here
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # else a process for each CPU, unused
        ray.init(address="local", num_cpus=4, include_dashboard=False)
        try:
            port = free_port()
            serve.start(http_options={"port": port})
            config = tiny_config(tiny_folder)
            serve.run(application(config, num_replicas=2, ray_actor_options={"num_cpus": 1}))
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def test_answers_are_those_of_the_server(deployed: str, base_url: str):
    texts = [
        httpx.post(f"{at}/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
        for at in (f"{deployed}/v1", base_url)
    ]
    assert texts[0] == texts[1]


def test_streams_come_in_pieces(deployed: str, base_url: str):
    body = BODY | {"stream": True, "max_tokens": 400}  # what a busy server has at once is one piece
    streams = []
    for at in (f"{deployed}/v1", base_url):
        with httpx.stream("POST", f"{at}/completions", json=body, timeout=60) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        streams.append([json.loads(line)["choices"][0]["text"] for line in lines[:-1]])
    assert "".join(streams[0]) == "".join(streams[1])
    assert len(streams[0]) > 1


def test_errors_and_other_routes_pass(deployed: str):
    reply = httpx.post(f"{deployed}/v1/completions", json=BODY | {"max_tokens": -1}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert httpx.get(f"{deployed}/v1/models", timeout=60).json()["data"][0]["id"] == "tiny"
    pids: set[int] = set()

    def both_replicas() -> bool:
        pids.add(httpx.get(f"{deployed}/server_info", timeout=60).json()["pid"])
        return len(pids) == 2

    assert eventually(both_replicas)
