"""Which backends have run on which devices, as benchmarks/results has it, for
moe/planning/hardware_evidence.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree

Runs = dict[str, dict[str, str]]  # backend -> {device: day of the latest result}
TABLE = re.compile(r"^RUNS: .*?\}$", re.MULTILINE | re.DOTALL)


def backends_run(results: Path, names: Mapping[str, str]) -> Runs:
    """Over all rows that measured a runner or dispatcher without failing, and all tests on GPUs that passed.
    names: of each that results may have, today's."""
    runs: Runs = {}

    def ran(name: str, device: str, day: str) -> None:
        days = runs.setdefault(names[name], {})
        days[device] = max(day, days.get(device, ""))

    for file in sorted(results.glob("*.json")):
        result = json.loads(file.read_text())
        for row in result.get("rows", []):
            for name in {row.get("runner"), row.get("dispatcher")} & set(names):
                if not row.get("error_message"):
                    ran(name, result["device"], result["date"])
    for file in sorted(results.glob("test-gpu-*.xml")):
        for name, device, day in passed(file):
            if name in names:
                ran(name, device, day)
    return {name: dict(sorted(runs[name].items())) for name in sorted(runs)}


def passed(file: Path) -> Iterator[tuple[str, str, str]]:
    """(backend, device, day) of each test that passed, as tests/evidence.py wrote it into junit XML."""
    for suite in ElementTree.parse(file).iter("testsuite"):
        for case in suite.iter("testcase"):
            found = [(p.get("name"), p.get("value", "")) for p in case.iter("property")]
            device = dict(found).get("device")
            if device and not any(case.find(end) is not None for end in ("failure", "error", "skipped")):
                for name, value in found:
                    if name == "backend":
                        yield value, device, suite.get("timestamp", "")[:10]


def with_runs(module: str, runs: Runs) -> str:
    """The text of hardware_evidence.py with this table, as ruff formats it."""
    lines = [f'    "{name}": {json.dumps(days)},' for name, days in runs.items()]
    body = "{\n" + "\n".join(lines) + "\n}" if lines else "{}"
    return TABLE.sub(lambda _: f"RUNS: dict[str, dict[str, str]] = {body}", module, count=1)
