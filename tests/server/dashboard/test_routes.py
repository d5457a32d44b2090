"""The dashboard over HTTP: who is let in, what the feed says, and that closed pages cost nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.processes import await_reports, eventually, started
from tests.server.test_metrics import families
from turnout.config import ServerConfig
from turnout.server.api.control import Control
from turnout.server.api.service import Service
from turnout.server.dashboard.feed import Feed
from turnout.server.launch import ServerProcess
from turnout.server.supervise.engine import EngineSupervisor

KEY = "s3cret"
PARTS = ("main.js", "style.css", "uPlot.iife.min.js", "icon.svg")


@pytest.fixture(scope="module")
def guarded_server(tiny_folder: Path) -> Iterator[tuple[ServerProcess, str]]:
    with started(tiny_folder, api_key=KEY) as both:
        yield both


@pytest.fixture
def guarded(guarded_server: tuple[ServerProcess, str]) -> str:
    return guarded_server[1]


def messages(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(event, data) of a stream of server-sent events."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_only_the_key_opens_it(guarded: str):
    with httpx.Client(base_url=guarded, timeout=60) as http:
        form = http.get("/dashboard")
        assert form.status_code == 401
        assert "<form" in form.text
        assert http.get("/dashboard/style.css").status_code == 200
        for path in ("main.js", "events", "index.html", "nothing"):
            assert http.get(f"/dashboard/{path}").status_code == 401
        wrong = http.post("/dashboard/login", data={"key": "wrong"}, follow_redirects=True)
        assert (wrong.status_code, "not the key" in wrong.text) == (401, True)
        assert not http.cookies
        assert http.post("/dashboard/login", content=b"key=" + b"x" * 5000).status_code == 413
        page = http.post("/dashboard/login", data={"key": KEY}, follow_redirects=True)
        assert page.status_code == 200
        assert "main.js" in page.text
        assert all(http.get(f"/dashboard/{path}").status_code == 200 for path in PARTS)
        assert http.get("/dashboard/nothing").status_code == 404
        assert KEY not in "".join(http.cookies.values())
        assert http.get("/v1/models").status_code == 401  # the cookie opens nothing else
    bearer = {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{guarded}/dashboard", headers=bearer, timeout=60).status_code == 200
    assert (
        httpx.get(f"{guarded}/dashboard", cookies={"turnout_dashboard": "0" * 64}, timeout=60).status_code
        == 401
    )


def test_pages_may_load_nothing_from_elsewhere(http: httpx.Client):
    page = http.get("/dashboard")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) <= {"'self'", "'none'"}
    for name in set(re.findall(r'(?:src|href)="dashboard/([^"]+)"', page.text)):
        assert http.get(f"/dashboard/{name}").headers["content-security-policy"]


EXPERT_TOKENS = [2 * (3 + 20 - 1)] * 2  # by layer: top-2 of 3 prompt tokens and all but the last of 20


def test_the_feed_says_what_metrics_say(root: str, http: httpx.Client):
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
    await_reports(root)
    with http.stream("GET", "/dashboard/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        feed = messages(reply.iter_lines())
        name, about = next(feed)
        assert (name, about["model"], about["layers"], about["experts"]) == ("about", "tiny", [0, 1], 8)
        assert any("numba" in words for words in about["plan"])
        _, first = next(feed)
        assert http.post("/v1/completions", json=body).status_code == 200
        counts, rates = np.zeros(16, int), []
        for _, (_, tick) in zip(range(60), feed, strict=False):
            rates.append(tick["rates"]["generation_tokens_total"])
            counts += np.frombuffer(base64.b64decode(tick["experts"] or ""), "<u4") if tick["experts"] else 0
            if counts.sum() == sum(EXPERT_TOKENS):
                break
    gained = tick["values"]["generation_tokens_total"] - first["values"]["generation_tokens_total"]
    assert gained == 20
    assert max(rates) > 0
    assert counts.reshape(2, 8).sum(axis=1).tolist() == EXPERT_TOKENS
    found = families(http)
    for metric, value in tick["values"].items():
        if "rank_balancedness" not in metric and "hot" not in metric:  # which compare with earlier scrapes
            (sample,) = found[f"turnout:{metric.removesuffix('_total')}"].samples
            assert sample.value == value, metric
    (rank,) = tick["ranks"]
    assert (rank["rank"], rank["state"]) == (0, "idle")


def test_nothing_ticks_while_nobody_looks():
    async def look() -> None:
        config = ServerConfig()
        engine = EngineSupervisor(config)
        feed = Feed(Control(Service(config, engine), engine))
        assert feed._ticking is None
        viewers = [feed.watch(), feed.watch()]
        for viewer in viewers:
            await anext(viewer)
        first = await asyncio.gather(*(anext(viewer) for viewer in viewers))
        assert first[0] == first[1]  # made once for all
        ticking = feed._ticking
        assert ticking is not None
        for viewer in viewers:
            await viewer.aclose()
        assert not feed._viewers
        await asyncio.wait_for(ticking, 60)
        assert feed._ticking is None

    asyncio.run(look())


def test_a_server_that_leaves_does_not_wait_for_viewers(guarded_server: tuple[ServerProcess, str]):
    """The last test here: it ends the server."""
    (server, root), bearer = guarded_server, {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("GET", f"{root}/dashboard/events", headers=bearer, timeout=60) as reply:
        feed = messages(reply.iter_lines())
        next(feed)
        server.process.terminate()
        assert all(name in ("about", "tick") for name, _ in feed)  # until the stream ends, in order
        assert eventually(lambda: server.process.poll() is not None, 20)  # of 30 s that it may drain
        assert server.process.returncode == 0
