"""Answers while ranks die, compared with those of the same server before."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.server.processes import eventually
from tests.serving import tiny_config
from tools import chaos
from turnout.config import ServerConfig
from turnout.server.supervise.watchdog import SILENT_SECONDS


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template that shows tools."""
    folder = tmp_path_factory.mktemp("replay") / "model"
    shutil.copytree(tiny_folder, folder)
    template = folder / "chat_template.jinja"
    template.write_text(
        "{% for tool in tools or () %}{{ tool.function.name }}{% endfor %}" + template.read_text()
    )
    return folder


def config(folder: Path, mode: str, **fields: Any) -> ServerConfig:
    return tiny_config(folder, **(chaos.FLAGS | chaos.MODES[mode] | fields))


def assert_nothing_lost(row: dict[str, Any]) -> None:
    assert row["wrong"] == []
    assert row["left_behind"] == {}
    assert row["exit_code"] == 0
    assert row["restarts"] == row["failures"]
    assert row["resumed_requests"] >= row["failures"]
    assert row["answers"] >= row["clients"]


@pytest.mark.parametrize("stream_interval", [1, pytest.param(5, marks=pytest.mark.more)])
def test_no_answer_changes_while_ranks_fail(
    stream_interval: int, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Steps overlap, so that a forward fails before the tokens are read of the one before. Tokens that a rank
    holds back are lost with it, and computed again."""
    monkeypatch.setenv("TURNOUT_CLOCK_JUMPS", "86400")  # no deadline counts by the time of day
    kinds = ["exit", "restart"]
    ahead = config(
        folder,
        "dp2",
        overlap_schedule="on",
        speculative_algorithm="none",
        stream_interval=stream_interval,
    )
    row = chaos.run(ahead, clients=16, tokens=60, kinds=kinds, failures=2, every=0.3)
    assert_nothing_lost(row)
    assert "ended with exit code 3; on host" in row["kinds"]["exit"]["said"]


@pytest.mark.more
@pytest.mark.parametrize(("mode", "overlap"), [("dp2", "off"), ("tp2", "on"), ("dp4", "on")])
def test_no_answer_of_many_changes_whatever_happens_to_ranks(
    mode: str, overlap: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    if mode == "tp2":
        monkeypatch.setenv("TURNOUT_CLOCK_JUMPS", "86400")
    kinds = list(chaos.KINDS)
    made = config(folder, mode, overlap_schedule=overlap)
    row = chaos.run(made, clients=64, tokens=100, kinds=kinds, failures=len(kinds), every=0.5)
    assert_nothing_lost(row)
    assert "the engine failed: RuntimeError: injected" in row["kinds"]["raise"]["said"]
    (silent,) = re.findall(r"does not run: no heartbeat for (\d+) s", row["kinds"]["stop"]["said"])
    assert int(silent) >= SILENT_SECONDS  # since the last one that was seen, which a busy machine delays
    assert "was killed by SIGSEGV" in row["kinds"]["crash"]["said"]
    # Who notices first says it: torch, or the dynamic loader, which then exits with 127.
    assert re.search("can't allocate memory|exit code 127", row["kinds"]["memory"]["said"])
    assert "ended with exit code 3" in row["kinds"]["exit"]["said"]
    assert re.search(r"message \d+ of rank \d was lost", row["kinds"]["lose"]["said"])
    for kind, noticed in row["kinds"].items():
        bound = SILENT_SECONDS if kind == "stop" else 0
        assert noticed["noticed_less_cpu_waits_s"]["most"] < bound + 3, kind  # of WAITING_SECONDS


@pytest.mark.parametrize(
    ("others", "fields", "asked"),
    [(7, {"scheduling_policy": "priority", "max_running_requests": 4}, {"priority": -1}), (63, {}, {})],
)
@pytest.mark.more
def test_a_request_that_kills_ranks_ends_and_no_other(
    others: int,
    fields: dict[str, Any],
    asked: dict[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Also if it came last and is computed first."""
    poison = [7, 77, 7]
    monkeypatch.setenv("TURNOUT_POISON", json.dumps(poison))

    async def together(made: chaos.Chaos) -> tuple[list[chaos.Answer], httpx.Response, list[chaos.Answer]]:
        undisturbed = await asyncio.gather(*(chaos.ask(made.http, asked) for asked in made.asked))
        answers = asyncio.gather(*(chaos.ask(made.http, asked) for asked in made.asked))
        await asyncio.sleep(0.05)
        refused = await made.http.post("completions", json={"prompt": poison, "max_tokens": 8} | asked)
        return undisturbed, refused, await answers

    with chaos.server_of(config(folder, "dp2", **fields)) as (server, files):
        made = chaos.Chaos(server, files, 100, others)
        undisturbed, refused, answers = asyncio.run(together(made))
        for expected, answer in zip(undisturbed, answers, strict=True):
            assert answer.differs(expected) == ""
        if others >= len(chaos.ASKED):
            assert any(any(answer.thoughts.values()) for answer in undisturbed)
            assert any(text.startswith("count{") for answer in undisturbed for text in answer.texts.values())
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "engine_failed"
        (died,) = re.findall(r"the ranks died (\d+) times over this", refused.json()["error"]["message"])
        assert eventually(lambda: httpx.get(f"{made.root}/ready", timeout=60).status_code == 200)
        info = httpx.get(f"{made.root}/server_info", headers=chaos.HEADERS, timeout=60).json()
        assert info["restarts"] == int(died)
        computed = min(
            sum(body.get("n", 1) for body in made.asked) + 1, fields.get("max_running_requests", 64)
        )
        assert 4 <= int(died) <= 2 + math.log2(computed) + 1  # found by bisection
        metrics = httpx.get(f"{made.root}/metrics", headers=chaos.HEADERS, timeout=60).text
        (ended,) = re.findall(r'request_success_total{finished_reason="error".*} (.*)', metrics)
        assert float(ended) == 1


@pytest.mark.more
def test_ranks_that_restart_serve_what_lies_on_the_disk_then(tiny_folder: Path, tmp_path: Path, root: str):
    changed = tmp_path / "model"
    shutil.copytree(tiny_folder, changed)
    (file,) = changed.glob("*.safetensors")
    save_file({name: -weight for name, weight in load_file(file).items()}, file)

    def texts(at: str) -> list[str]:
        body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
        replies = [
            httpx.post(
                f"{at}/v1/completions", json=body | {"prompt": prompt}, headers=chaos.HEADERS, timeout=60
            )
            for prompt in ("pears", "plums and pears", "12 apples")
        ]
        return [reply.json()["choices"][0]["text"] for reply in replies]

    with chaos.server_of(config(changed, "one")) as (server, _):
        assert server.base_url is not None
        served = server.base_url.removesuffix("/v1")
        assert texts(served) != texts(root)
        shutil.copy(tiny_folder / file.name, file)
        httpx.post(f"{served}/restart", headers=chaos.HEADERS, timeout=60).raise_for_status()
        assert texts(served) == texts(root)
