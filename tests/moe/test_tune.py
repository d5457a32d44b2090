"""Measured times: taken, kept, read back only while they count, and what plans make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.moe.broken import BROKEN, offer
from tests.moe.build import make_experts, make_plan, make_spec
from tests.moe.made_up import BUDGET, CPU, SPEC, dispatcher, runner
from turnout.moe import plan
from turnout.moe.backends.torch.runner import TorchRunner
from turnout.moe.capabilities.declared import RUNNERS
from turnout.moe.plan import PlanRequest
from turnout.moe.planning import measured
from turnout.moe.planning.measured import Measured
from turnout.moe.planning.runner_by_batch_size import means
from turnout.moe.tune import times
from turnout.moe.verify import Inputs
from turnout.parallel.topology import Topology

VERSIONS = measured.versions(RUNNERS.values())
LAYER = measured.describe(SPEC, Topology(), CPU, "float32")
TIMES = {"oak": {1: 10.0, 16: 1000.0}, "elm": {1: 40.0, 16: 90.0}}


def kept(folder: Path, **fields) -> Path:
    values = {
        "layer": LAYER,
        "versions": VERSIONS,
        "date": "2026-11-21",
        "microseconds": TIMES,
    }
    return measured.write(folder, Measured(**(values | fields)))


def test_what_was_kept_is_read_and_its_mean_is_over_batch_sizes(tmp_path: Path):
    assert measured.read(tmp_path, LAYER, VERSIONS) == {}
    kept(tmp_path)
    assert measured.read(tmp_path, LAYER, VERSIONS) == TIMES
    assert means(TIMES) == {"oak": pytest.approx(100), "elm": pytest.approx(60)}
    assert len(list(tmp_path.rglob("*"))) == 2  # the folder and the file: no draft is left


def test_another_layer_device_or_arrangement_was_not_measured(tmp_path: Path):
    kept(tmp_path)
    for layer in (
        measured.describe(make_spec(), Topology(), CPU, "float32"),
        measured.describe(SPEC, Topology(tp_size=2, ep_size=2), CPU, "float32"),
        measured.describe(SPEC, Topology(), CPU, "bfloat16"),
        measured.describe(SPEC, Topology(), CPU, "float32", "fp8"),
    ):
        assert measured.read(tmp_path, layer, VERSIONS) == {}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "[]", "cannot be read"),
        (lambda text: text.replace('"oak"', "17"), "cannot be read"),
        (lambda text: text.replace("40.0", "-1.0"), "does not hold times of this layer"),
        (lambda text: text.replace('"hidden_size": 1024', '"hidden_size": 512'), "not hold times of this"),
        (lambda text: json.dumps(json.loads(text) | {"microseconds": {"oak": {}}}), "not hold times of this"),
        (lambda text: text.replace(torch.__version__, "2.0"), "measured with torch 2.0"),
        (lambda text: text.replace('"kernels": "packed ', '"kernels": "packed 9'), "measured with kernels"),
    ],
)
def test_files_that_do_not_count_are_left_aside_with_a_warning(
    damage, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = kept(tmp_path)
    file.write_text(damage(file.read_text()))
    assert measured.read(tmp_path, LAYER, VERSIONS) == {}
    assert said in caplog.text
    assert "turnout tune" in caplog.text
    assert str(file) in caplog.text


def planned(means_of: dict[str, float], **request: str):
    return plan(
        SPEC,
        topology=Topology(),
        budget=BUDGET,
        hardware=CPU,
        request=PlanRequest(**request),
        compute_dtype="float32",
        runners=[runner("oak", preference=10), runner("elm"), runner("fir")],
        dispatchers=[dispatcher()],
        measured={name: {16: us} for name, us in means_of.items()},
    )


def test_auto_takes_the_runner_measured_best_and_says_so():
    assert planned({}).prefill.runner == "oak"
    best = planned({"oak": 100, "elm": 60})
    assert best.runner_by_batch_size == ()
    assert (best.prefill.runner, best.decode.runner) == ("elm", "elm")
    assert best.reasons[0] == (
        "runner elm: measured 60 us, mean over batch sizes, before oak 100 us, fir, not measured"
    )
    assert planned({"gone": 1}).reasons[0].startswith("runner oak: preference 10")


def test_what_is_asked_for_is_taken_whatever_was_measured():
    asked = planned({"oak": 100, "elm": 60}, moe_runner_backend="oak")
    assert asked.prefill.runner == "oak"
    assert "asked for" in asked.reasons[0]


def test_the_slower_of_two_runners_is_measured_as_such(monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, "Dawdles")
    spec = make_spec()
    runners = {}
    for name, cls in (("torch", TorchRunner), ("Dawdles", BROKEN["Dawdles"])):
        runners[name] = cls(spec, make_plan(spec), torch.device("cpu"))
        runners[name].prepare(make_experts(spec))
    draw = torch.Generator().manual_seed(1)
    weights_TK, ids_TK = torch.rand(5, spec.num_experts, generator=draw).topk(spec.top_k)
    x_TH = torch.randn(5, spec.hidden_size, generator=draw)
    found = times(
        runners, Inputs(x_TH=x_TH, ids_TK=ids_TK.int(), weights_TK=weights_TK), 16, lambda done, of: None
    )
    assert list(found["torch"]) == list(found["Dawdles"]) == [1, 4, 16]
    for tokens, slow in found["Dawdles"].items():
        assert slow > 10_000  # it sleeps so long
        assert slow > found["torch"][tokens] > 0
