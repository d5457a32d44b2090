"""Outcomes of tests on GPUs, from a real run of pytest under tests/evidence.py to a page."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu_tests import main, page
from tools.proven import backends_run
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS

SUITE = '''
"""Exchanges and layers."""
from dataclasses import dataclass

import pytest

@dataclass
class Spec:
    format: str = "nvfp4"

@dataclass
class Case:
    runner: str
    spec: Spec
    activation_format: str = "bf16"

@pytest.mark.gpu
@pytest.mark.parametrize("dispatcher", ["nvlink", "none"])
def test_exchange(dispatcher):
    assert dispatcher == "nvlink"

@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case("hopper", Spec()), Case("made up", Spec())])
def test_matrix(case): pass

@pytest.mark.gpu
@pytest.mark.parametrize("runner", ["torch"])
def test_skipped(runner): pytest.skip("no such library")

@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["collective"])
def test_of_a_flag(wanted): pass

def test_without_a_gpu(): pass
'''
CONFTEST = """
from tests import evidence
from tests.evidence import pytest_runtest_setup

evidence.machine = lambda: {
    "device": "some GPU", "devices": "2", "commit": "c0ffee", "torch": "2.11", "triton": "3.6"
}

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: on a GPU")
"""


@pytest.fixture(scope="module")
def junit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_suite.py").write_text(SUITE)
    arguments = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", f"{folder}/test_suite.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, f"--junitxml={folder}/gpu.xml"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 failed, 5 passed, 1 skipped" in run.stdout, run.stdout
    return folder / "gpu.xml"


def test_a_run_becomes_a_result_a_page_and_evidence(junit, tmp_path, capsys):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (tmp_path / "test_suite.py").write_text(SUITE)
    assert main([str(junit)], results) == 0
    day = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    [file] = results.iterdir()
    assert file.name == f"gpu-tests-some-gpu-x2-{day}-c0ffee.json"
    assert f"{file}: 4 passed, 1 failed, 1 skipped" in capsys.readouterr().err
    content = json.loads(file.read_text())
    assert content.pop("started").startswith(day)
    named = {"runner": "hopper", "weights": "nvfp4", "activations": "bf16"}
    assert content == {
        "device": "some GPU",
        "devices": 2,
        "commit": "c0ffee",
        "torch": "2.11",
        "triton": "3.6",
        "tests": {
            "test_suite.py::test_exchange[nvlink]": {"outcome": "passed", "dispatcher": "nvlink"},
            "test_suite.py::test_exchange[none]": {"outcome": "failed", "dispatcher": "none"},
            "test_suite.py::test_matrix[case0]": {"outcome": "passed"} | named,
            "test_suite.py::test_matrix[case1]": {
                "outcome": "passed",
                "weights": "nvfp4",
                "activations": "bf16",
            },
            "test_suite.py::test_skipped[torch]": {"outcome": "skipped", "runner": "torch"},
            "test_suite.py::test_of_a_flag[collective]": {"outcome": "passed"},
        },
    }
    runs = backends_run(results, {name: name for name in (*RUNNERS, *DISPATCHERS)})
    assert runs == {"hopper": {"some GPU": day}, "nvlink": {"some GPU": day}}
    text = page(tmp_path)
    assert "| `hopper` | - | `nvfp4` | `bf16` | 1 passed |" in text
    assert "| - | `none` | - | - | 1 failed |" in text
    every = "4 passed, 1 failed, 1 skipped"
    assert f"| `test_suite.py` | Exchanges and layers. | {every} | {day}, `c0ffee` |" in text
    assert f"* `test_suite.py::test_exchange[none]` ({day}, `c0ffee`)" in text


def test_what_ran_again_replaces_its_outcome_and_nothing_else(junit, tmp_path):
    again = tmp_path / "again.xml"
    again.write_text(
        junit.read_text().replace("<failure", "<system-out").replace("</failure", "</system-out")
    )
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    file = results / "gpu-tests.json"
    command = [sys.executable, "-m", "tools.gpu_tests", str(junit), "--output", str(file)]
    subprocess.run(command, check=True, timeout=120)
    before = json.loads(file.read_text())["tests"]
    assert main([str(again), "--output", str(file)]) == 0
    failed = "test_suite.py::test_exchange[none]"
    after = json.loads(file.read_text())["tests"]
    assert after == before | {failed: before[failed] | {"outcome": "passed"}}
    assert main([str(junit), "--commit", "later"], results) == 0
    text = page(tmp_path)
    assert "1 failed" in text.partition("## some GPU")[2]
    assert "`c0ffee`" not in text.partition("## some GPU")[2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("some GPU", ""), "incomplete: {'device': ''"),
        (('name="device"', 'name="other"'), "no test ran on a GPU"),
        (("</testsuites>", ""), "not junit XML that can be read"),
    ],
)
def test_what_cannot_be_a_result_is_refused(change, says, junit, tmp_path, capsys):
    wrong = tmp_path / "wrong.xml"
    wrong.write_text(junit.read_text().replace(*change))
    assert main([str(wrong)], tmp_path / "results") == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_two_machines_are_two_results(junit, tmp_path, capsys):
    other = tmp_path / "other.xml"
    other.write_text(junit.read_text().replace("some GPU", "another"))
    assert main([str(junit), str(other)], tmp_path) == 2
    told = capsys.readouterr().err
    assert all(name in told for name in ("'another'", "'some GPU'"))
