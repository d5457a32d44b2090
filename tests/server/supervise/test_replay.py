"""Answers while ranks die, compared with those of the same server before."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.processes import eventually
from tests.serving import tiny_config
from tools import chaos
from turnout.config import ServerConfig
from turnout.server.supervise.watchdog import SILENT_SECONDS


def config(folder: Path, mode: str, **fields: Any) -> ServerConfig:
    flags = chaos.MODES[mode] | {"api_key": chaos.KEY, "speculative_algorithm": "ngram"} | fields
    return tiny_config(folder, **flags)


def assert_nothing_lost(row: dict[str, Any]) -> None:
    assert row["wrong"] == []
    assert row["left_behind"] == {}
    assert row["exit_code"] == 0
    assert row["restarts"] == row["failures"]
    assert row["resumed_requests"] >= row["failures"]
    assert row["answers"] >= row["clients"]


def test_no_answer_changes_while_ranks_fail(tiny_folder: Path):
    kinds = ["exit", "restart"]
    row = chaos.run(config(tiny_folder, "dp2"), clients=16, tokens=60, kinds=kinds, failures=2, every=0.3)
    assert_nothing_lost(row)
    assert "ended with exit code 3; on host" in row["kinds"]["exit"]["said"]


@pytest.mark.more
@pytest.mark.parametrize("mode", ["dp2", "tp2"])
def test_no_answer_of_many_changes_whatever_happens_to_ranks(
    mode: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    if mode == "tp2":
        monkeypatch.setenv("TURNOUT_CLOCK_JUMPS", "86400")  # no deadline counts by the time of day
    kinds = list(chaos.KINDS)
    row = chaos.run(
        config(tiny_folder, mode), clients=64, tokens=100, kinds=kinds, failures=len(kinds), every=0.5
    )
    assert_nothing_lost(row)
    assert "the engine failed: RuntimeError: injected" in row["kinds"]["raise"]["said"]
    assert "does not run: no heartbeat for 3 s" in row["kinds"]["stop"]["said"]
    assert "was killed by SIGSEGV" in row["kinds"]["crash"]["said"]
    # Who notices first says it: torch, or the dynamic loader, which then exits with 127.
    assert re.search("can't allocate memory|exit code 127", row["kinds"]["memory"]["said"])
    assert "ended with exit code 3" in row["kinds"]["exit"]["said"]
    for kind, noticed in row["kinds"].items():
        bound = SILENT_SECONDS if kind == "stop" else 0
        assert bound <= noticed["noticed_s"]["most"], kind
        assert noticed["noticed_less_cpu_waits_s"]["most"] < bound + 1, kind


@pytest.mark.parametrize("others", [7, pytest.param(63, marks=pytest.mark.more)])
def test_a_request_that_kills_ranks_ends_and_no_other(
    others: int, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    poison = [7, 77, 7]
    monkeypatch.setenv("TURNOUT_POISON", json.dumps(poison))

    async def together(made: chaos.Chaos) -> tuple[list[chaos.Answer], httpx.Response, list[chaos.Answer]]:
        undisturbed = await asyncio.gather(*(chaos.ask(made.http, asked) for asked in made.asked))
        asked = {"prompt": poison, "max_tokens": 8}
        answers = asyncio.gather(*(chaos.ask(made.http, asked) for asked in made.asked))
        await asyncio.sleep(0.05)
        refused = await made.http.post("completions", json=asked)
        return undisturbed, refused, await answers

    with chaos.server_of(config(tiny_folder, "dp2")) as (server, folder):
        made = chaos.Chaos(server, folder, 100, others)
        undisturbed, refused, answers = asyncio.run(together(made))
        for expected, answer in zip(undisturbed, answers, strict=True):
            assert answer.differs(expected) == ""
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "engine_failed"
        assert "the ranks died 4 times over this request" in refused.json()["error"]["message"]
        assert eventually(lambda: httpx.get(f"{made.root}/ready").status_code == 200)
        info = httpx.get(f"{made.root}/server_info", headers=chaos.HEADERS).json()
        assert info["restarts"] == 4
        metrics = httpx.get(f"{made.root}/metrics", headers=chaos.HEADERS).text
        (ended,) = re.findall(r'request_success_total{finished_reason="error".*} (.*)', metrics)
        assert float(ended) == 1
