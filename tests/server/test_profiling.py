"""Profiles over HTTP: what two ranks did in the same steps, as one trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.processes import ranks_of, started
from turnout.server.launch import ServerProcess

KEY = {"Authorization": "Bearer s3cret"}
BODY = {"prompt": "a", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def two_ranks(tiny_folder: Path) -> Iterator[tuple[ServerProcess, httpx.Client]]:
    with (
        started(tiny_folder, tp_size=2, api_key="s3cret") as (server, root),
        httpx.Client(base_url=root, headers=KEY, timeout=120) as http,
    ):
        yield server, http


def steps(trace: dict[str, Any], rank: int) -> list[tuple[float, float]]:
    """Begin and end of the steps of `rank`, in us."""
    of_rank = [event for event in trace["traceEvents"] if event["pid"] // 1000 == rank and event["ph"] == "X"]
    found = [event for event in of_rank if event["name"] == "step"]
    assert {event["tid"] for event in found} <= {
        event["tid"] for event in of_rank if "aten::" in event["name"]
    }
    return [(event["ts"], event["ts"] + event["dur"]) for event in found]


def record(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    started_ = http.post("/start_profile", json=fields) if fields else http.post("/start_profile")
    assert started_.json() == {"status": "profiling"}
    assert http.post("/v1/completions", json=BODY).json()["usage"]["completion_tokens"] == 12
    answer = http.post("/stop_profile")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-disposition"] == 'attachment; filename="turnout-profile.json"'
    return answer.json()


def test_one_trace_shows_all_ranks_in_the_same_steps(two_ranks):
    _, http = two_ranks
    trace = record(http)
    names = [
        e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"
    ]
    assert {name.partition(":")[0] for name in names} == {"rank 0", "rank 1"}
    begins = []
    for rank in (0, 1):
        shown = steps(trace, rank)
        busy = sorted(shown, key=lambda step: step[0] - step[1])[:8]  # the others found nothing to do
        assert len(busy) == 8
        begins.append(min(begin for begin, _ in busy))
        spans = [
            e for e in trace["traceEvents"] if e["pid"] // 1000 == rank and e.get("name") == "aten::embedding"
        ]
        assert len(spans) >= 12
        assert all(any(a <= e["ts"] <= b for a, b in shown) for e in spans)
    # Both ranks' steps lie on one axis of time: they wait for each other in every one.
    first, second = (sorted(steps(trace, rank)) for rank in (0, 1))
    overlapping = sum(any(c < b and a < d for c, d in second) for a, b in first)
    assert overlapping >= 0.9 * len(first)
    assert abs(begins[0] - begins[1]) < 60e6


def test_recording_ends_after_so_many_steps(two_ranks):
    _, http = two_ranks
    few = record(http, num_steps=3, record_shapes=True)
    for rank in (0, 1):
        embedded = [
            e for e in few["traceEvents"] if e["pid"] // 1000 == rank and e.get("name") == "aten::embedding"
        ]
        assert len(embedded) == 3
        assert all("Input Dims" in e["args"] for e in embedded)


def test_what_cannot_be_done_is_said(two_ranks):
    _, http = two_ranks
    refused = http.post("/stop_profile")
    assert (refused.status_code, "/start_profile" in refused.text) == (409, True)
    for body, reason in (
        ({"num_steps": 0}, "num_steps"), ({"num_steps": 1001}, "num_steps"),
        ({"output_dir": "/tmp"}, "output_dir"), ({"activities": ["CPU"]}, "activities"),
        ([], "must be a JSON object"),
    ):  # fmt: skip
        wrong = http.post("/start_profile", json=body)
        assert (wrong.status_code, reason in wrong.json()["error"]["message"]) == (400, True), wrong.text
    assert http.post("/start_profile", headers={"Authorization": "Bearer no"}).status_code == 401
    assert http.post("/start_profile").status_code == 200
    again = http.post("/start_profile")
    assert (again.status_code, "/stop_profile" in again.text) == (409, True)
    assert http.post("/stop_profile").status_code == 200


@pytest.mark.more
def test_ranks_that_start_anew_know_of_no_profile(two_ranks):
    server, http = two_ranks
    assert http.post("/start_profile").status_code == 200
    ranks_of(server)[1].kill()
    assert http.post("/v1/completions", json=BODY).status_code == 200
    assert http.post("/stop_profile").status_code == 409
    assert record(http)["traceEvents"]


def test_who_has_no_key_to_show_cannot_profile(http: httpx.Client):
    for path in ("/start_profile", "/stop_profile"):
        refused = http.post(path)
        assert (refused.status_code, "--api-key" in refused.text) == (403, True)
