"""Which backends ran where is read from results, and told apart from what never ran."""

import datetime
import json
import subprocess
import sys
from pathlib import Path

from tools.proven import backends_run, with_runs
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.planning.hardware_evidence import RUNS, evidence


def test_runs_are_read_from_rows_that_did_not_fail(tmp_path):
    def result(name, device, date, *rows):
        (tmp_path / f"{name}.json").write_text(json.dumps({"device": device, "date": date, "rows": rows}))

    result("a", "GPU", "2026-01-02", {"runner": "oak"}, {"runner": "a peer"})
    result("b", "GPU", "2026-01-01", {"runner": "oak"}, {"dispatcher": "ash", "error_message": "no"})
    result("c", "CPU", "2026-01-03", {"runner": "oak", "dispatcher": "elm"}, {"time_us": 1.0})
    runs = backends_run(tmp_path, {name: name for name in ("oak", "ash", "elm")})
    assert runs == {"elm": {"CPU": "2026-01-03"}, "oak": {"CPU": "2026-01-03", "GPU": "2026-01-02"}}
    assert evidence("oak", "", runs) == "ran on CPU (2026-01-03), GPU (2026-01-02)"
    assert evidence("oak", "seen", runs) == "ran on CPU (2026-01-03), GPU (2026-01-02); elsewhere seen"
    assert evidence("ash", "looked at", runs) == "has no recorded run on hardware; looked at"


SUITE = """
from dataclasses import dataclass

import pytest

pytestmark = pytest.mark.gpu

@dataclass
class Case:
    runner: str

@pytest.mark.parametrize("dispatcher", ["nvlink", "none"])
def test_exchange(dispatcher):
    assert dispatcher == "nvlink"

@pytest.mark.parametrize("case", [Case("hopper"), Case("made up")])
def test_matrix(case): pass

@pytest.mark.parametrize("runner", ["torch"])
def test_skipped(runner): pytest.skip("no such library")

@pytest.mark.parametrize("wanted", ["collective"])
def test_of_a_flag(wanted): pass
"""
CONFTEST = """
from tests import evidence
from tests.evidence import pytest_runtest_setup

evidence.device_name = lambda: "some GPU"

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: on a GPU")
"""


def test_tests_on_gpus_count_where_they_passed(tmp_path):
    """A suite that runs under tests/evidence.py: what passed counts; what failed or was skipped does not."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_suite.py").write_text(SUITE)
    arguments = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"{tmp_path}/test_suite.py"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, f"--junitxml={tmp_path}/test-gpu-some.xml"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 failed, 4 passed, 1 skipped" in run.stdout, run.stdout
    day = datetime.date.today().isoformat()
    runs = backends_run(tmp_path, {name: name for name in (*RUNNERS, *DISPATCHERS)})
    assert runs == {"hopper": {"some GPU": day}, "nvlink": {"some GPU": day}}


def test_the_table_is_replaced_whatever_it_held():
    module = "before\nRUNS: dict[str, dict[str, str]] = {}\nafter {}\n"
    filled = with_runs(module, {"oak": {"GPU": "2026-01-02"}})
    assert '    "oak": {"GPU": "2026-01-02"},\n}\nafter {}' in filled
    assert with_runs(filled, {}) == module


def test_only_registered_backends_are_named():
    assert set(RUNS) <= {*RUNNERS, *DISPATCHERS}
