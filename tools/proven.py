"""Which backends have run on which devices, as benchmarks/results has it, for
moe/planning/hardware_evidence.py."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from tools import gpu_tests

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
    for _, result in gpu_tests.load(results):
        for about in result["tests"].values():
            for name in {about.get("runner"), about.get("dispatcher")} & set(names):
                if about["outcome"] == "passed":
                    ran(name, result["device"], result["started"][:10])
    return {name: dict(sorted(runs[name].items())) for name in sorted(runs)}


def with_runs(module: str, runs: Runs) -> str:
    """The text of hardware_evidence.py with this table, as ruff formats it."""
    lines = [f'    "{name}": {json.dumps(days)},' for name, days in runs.items()]
    body = "{\n" + "\n".join(lines) + "\n}" if lines else "{}"
    return TABLE.sub(lambda _: f"RUNS: dict[str, dict[str, str]] = {body}", module, count=1)
