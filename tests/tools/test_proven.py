"""Which backends ran where is read from results, and told apart from what never ran."""

import json

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


def test_the_table_is_replaced_whatever_it_held():
    module = "before\nRUNS: dict[str, dict[str, str]] = {}\nafter {}\n"
    filled = with_runs(module, {"oak": {"GPU": "2026-01-02"}})
    assert '    "oak": {"GPU": "2026-01-02"},\n}\nafter {}' in filled
    assert with_runs(filled, {}) == module


def test_only_registered_backends_are_named():
    assert set(RUNS) <= {*RUNNERS, *DISPATCHERS}
