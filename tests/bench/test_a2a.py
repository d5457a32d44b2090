"""The benchmark of dispatchers end to end on ranks small enough to take no time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import torch

from tests.ranks import Pools, Rank
from turnout.bench import a2a
from turnout.bench.collectives import Recorded, repeat
from turnout.bench.results import check_measured
from turnout.errors import UserError
from turnout.formats.spec import token_bytes

TINY = ["--hidden", "128", "--experts", "8", "--topk", "2", "--device", "cpu"]


def test_rows_of_every_dispatcher_on_ranks_that_it_starts(tmp_path):
    path = tmp_path / "a2a.json"
    content = a2a.run(
        hidden=128,
        experts=8,
        top_k=2,
        tokens=[4],
        formats=["bf16", "nvfp4"],
        routings=["zipf"],
        device="cpu",
        output=path,
        plot=tmp_path / "a2a.svg",
    )
    drawn = ElementTree.parse(tmp_path / "a2a.svg").getroot()
    assert len(drawn.findall("{*}polyline")) == 2 * 3, "a line for each dispatcher in a panel for each format"
    assert json.loads(path.read_text()) == content
    assert (content["benchmark"], content["devices"]) == ("a2a", 2)
    rows = content["rows"]
    assert [(row["dispatcher"], row["format"]) for row in rows] == [
        (dispatcher, format)
        for format in ("bf16", "nvfp4")
        for dispatcher in ("none", "collective", "collective-experts")
    ]
    for row in rows:
        assert (row["tokens"], row["hidden"], row["topk"], row["experts"]) == (4, 128, 2, 8)
        assert 0 < row["error"] < 1e-5
        for part in ("dispatch", "combine"):
            assert row[f"{part}_us"] > 0 < row[f"raw_{part}_us"]
        # Four tokens at most go to the other rank, with ids and weights, and results come back.
        most = 4 * (token_bytes(row["format"], 128, itemsize=4) + 4 * 128 + 8 * 2) + 8
        assert 0 < row["wire_bytes"] <= most
        assert row["wire_bytes"] == most - 8 or row["dispatcher"] != "none"


@pytest.mark.more
def test_under_torchrun_and_a_refused_point_is_a_row(tmp_path):
    path = tmp_path / "a2a.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command += [sys.executable, "-m", "turnout.cli", "bench", "a2a", *TINY, "--output", str(path)]
    command += ["--hidden", "64", "--tokens", "3", "--dispatcher", "collective"]
    command += ["--format", "bf16", "--format", "fp8"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    measured, refused = json.loads(path.read_text())["rows"]
    assert measured["dispatch_us"] > 0
    assert "--moe-dispatch-dtype fp8 at hidden size 64" in refused["error_message"]
    assert ran.stdout.count("Dispatch and combine, 2 x") == 1


@pytest.mark.more
def test_what_was_measured_is_kept_when_interrupted(tmp_path):
    path = tmp_path / "a2a.json"
    command = [sys.executable, "-m", "turnout.cli", "bench", "a2a", *TINY, "--dispatcher", "collective"]
    command += ["--output", str(path), *(flag for n in range(1, 400) for flag in ("--tokens", str(n)))]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # also in the background
    ) as bench:
        assert bench.stderr is not None
        while " tokens:" not in bench.stderr.readline():
            assert bench.poll() is None
        bench.send_signal(signal.SIGINT)
        bench.stderr.read()
    assert bench.returncode == 0
    assert 1 <= len(json.loads(path.read_text())["rows"]) < 399


def test_ctrl_c_while_ranks_start():
    """A terminal sends it to all of them."""
    command = [sys.executable, "-m", "turnout", "bench", "a2a", *TINY]
    for _ in range(5):  # a busy machine may let ranks measure something before they are interrupted
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        ) as bench:
            while len(psutil.Process(bench.pid).children()) < 3:  # two ranks, and what tracks their resources
                assert bench.poll() is None
                time.sleep(0.01)
            os.killpg(bench.pid, signal.SIGINT)
            out, errors = bench.communicate()
        if " tokens:" not in errors:
            break
    assert (out, errors) == ("", "interrupted: nothing is measured\n"), "no table without rows"
    assert bench.returncode == 128 + signal.SIGINT


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_command(tmp_path: Path, number: signal.Signals):
    command = [sys.executable, "-m", "turnout.cli", "bench", "a2a", *TINY, "--dispatcher", "collective"]
    command += [flag for n in range(1, 400) for flag in ("--tokens", str(n))]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as bench:
        assert bench.stderr is not None
        while " tokens:" not in bench.stderr.readline():
            assert bench.poll() is None
        ranks = psutil.Process(bench.pid).children()
        bench.send_signal(number)
        bench.wait()
        assert len(ranks) >= 2
        _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    assert not list(tmp_path.glob("turnout-a2a-*"))


def test_nothing_measured_is_an_error_with_the_reasons():
    failed = {"error_message": "no such thing"}
    with pytest.raises(UserError, match=r"nothing was measured, all 2 points failed: no such thing$"):
        check_measured([failed, failed, {"peer": True, "time_us": 1.0}])
    check_measured([failed, {"time_us": 1.0}])
    check_measured([])


def record(rank: Rank) -> tuple[int, list[int]]:
    group = Recorded(rank.groups().world)
    x = torch.ones(6, 2)
    group.all_gather(x[:2], [2, 2])
    group.reduce_scatter(x, [2, 4])
    group.all_to_all(x, [1, 5], [1, 1] if rank.number == 0 else [5, 5])
    group.all_reduce(x)
    calls = group.taken()
    repeat(calls)
    return group.sent_bytes, [len(calls), len(group.taken())]


def test_what_is_recorded_is_what_goes_to_others(ranks: Pools):
    first, second = ranks(2).run(record)
    assert first == (8 * (2 + 4 + 5 + 6), [4, 0])
    assert second == (8 * (2 + 2 + 1 + 6), [4, 0])


@pytest.mark.parametrize(
    "wrong", [{"dispatchers": ["post"]}, {"formats": ["mxfp4"]}, {"routings": ["round"]}]
)
def test_unknown_names_list_the_known_ones(wrong):
    with pytest.raises(UserError, match=r"unknown \w+ '\w+'; known: "):
        a2a.run(device="cpu", **wrong)
