"""Outcomes of tests on GPUs: from pytest's junit XML to benchmarks/results, and to docs/gpu-tests.md.

    make test-gpu JUNIT=gpu.xml
    python -m tools.gpu_tests gpu.xml    adds to benchmarks/results/gpu-tests-DEVICE-DATE-COMMIT.json
    python -m tools.generate_docs        writes the page, and which backends have run on hardware

A result holds device, number of GPUs, versions, commit, and of each test its outcome ("passed", "failed" or
"skipped") with the runner, dispatcher and number formats among its parameters. tests/evidence.py writes those
into the XML.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tools.command_line import parser_for
from tools.tables import table
from turnout.bench.results import check_output, default_path
from turnout.errors import UserError

ROOT = Path(__file__).parents[1]
MACHINE = ("device", "devices", "commit", "torch", "triton")
COMBINATION = ("runner", "dispatcher", "weights", "activations")
NOTICE = "<!-- Written by tools/generate_docs.py from benchmarks/results/gpu-tests-*.json. -->"
Result = dict[str, Any]
Tests = dict[str, dict[str, str]]  # by pytest's id: outcome, and what of COMBINATION its parameters name


def main(arguments: Sequence[str] | None = None, results: Path = ROOT / "benchmarks" / "results") -> int:
    parser = parser_for(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.xml", help="one machine, one commit")
    parser.add_argument("--commit", default="", help="the commit that ran, where the machine had no git")
    parser.add_argument("--output", type=Path, help="another file to add to")
    options = parser.parse_args(arguments)
    try:
        result = read_junit(options.files, options.commit)
        path = options.output or default_path(_named(result), results)
        if path.is_file():
            result["tests"] = json.loads(path.read_text())["tests"] | result["tests"]
        check_output(path)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    path.write_text(_one_test_a_line(result))
    sys.stderr.write(f"{path}: {_counts(result['tests'].values())}\n")
    return 0


def read_junit(files: Sequence[Path], commit: str) -> Result:
    """One result of all tests in `files` but those that passed without a GPU; of a test in several, the last.
    Raise UserError where they come from several machines or commits, or none ran on a GPU."""
    names = ", ".join(map(str, files))
    machines, starts, tests = set(), set(), {}
    for file in files:
        for suite in _read(file).iter("testsuite"):
            starts.add(datetime.fromisoformat(suite.attrib["timestamp"]).astimezone(UTC))
            for case in suite.iter("testcase"):
                found = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
                outcome = _outcome(case)
                if "device" in found:
                    found["commit"] = commit or found["commit"]
                    machines.add(tuple(found.get(name, "") for name in MACHINE))
                elif outcome == "passed":
                    continue  # needs no GPU
                tests[_test_id(case)] = {"outcome": outcome} | {
                    k: found[k] for k in COMBINATION if k in found
                }
    if len(machines) != 1:
        found_ones = "; ".join(map(str, sorted(machines))) or "none: no test ran on a GPU"
        raise UserError(
            f"{names}: wants one ({', '.join(MACHINE)}), has {found_ones}. Give each its own call"
        )
    machine = dict(zip(MACHINE, machines.pop(), strict=True))
    if not all(machine.values()):
        raise UserError(
            f"{names}: incomplete: {machine}. --commit gives a commit; the rest, tests/evidence.py"
        )
    return machine | {
        "devices": int(machine["devices"]),
        "started": f"{min(starts):%Y-%m-%dT%H:%M:%S}",
        "tests": tests,
    }


def _read(file: Path) -> ElementTree.ElementTree:
    try:
        return ElementTree.parse(file)
    except (OSError, ElementTree.ParseError) as error:
        raise UserError(f"{file}: not junit XML that can be read ({error})") from None


def _test_id(case: ElementTree.Element) -> str:
    """pytest's; the file, where it could not be collected."""
    module, name = case.get("classname", ""), case.get("name", "")
    return f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py"


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def _named(result: Result) -> dict[str, str]:
    """What `default_path` makes gpu-tests-DEVICE-DATE-COMMIT.json of."""
    day = f"{result['started'][:10]}-{result['commit']}"
    return {"benchmark": "gpu-tests", "device": _machine(result), "date": day}


def _machine(result: Result) -> str:
    return result["device"] + (f" x{result['devices']}" if result["devices"] > 1 else "")


def _one_test_a_line(result: Result) -> str:
    head = json.dumps(result | {"tests": {}}, indent=1)
    lines = ",\n".join(
        f"  {json.dumps(test)}: {json.dumps(about)}" for test, about in result["tests"].items()
    )
    return head.removesuffix("{}\n}") + f"{{\n{lines}\n }}\n}}\n"


def load(folder: Path) -> list[tuple[Path, Result]]:
    """All results in a folder, the oldest first."""
    found = [(file, json.loads(file.read_text())) for file in folder.glob("gpu-tests-*.json")]
    return sorted(found, key=lambda pair: (pair[1]["started"], pair[0].name))


def page(root: Path) -> str:
    """docs/gpu-tests.md. Of a test that ran several times on a device, the last time counts."""
    results = load(root / "benchmarks" / "results")
    latest: dict[str, Tests] = defaultdict(dict)  # by device
    runs: dict[tuple[str, str], str] = {}  # device, test -> day and commit
    for _, result in results:
        latest[result["device"]] |= result["tests"]
        day = f"{result['started'][:10]}, `{result['commit']}`"
        runs |= {(result["device"], test): day for test in result["tests"]}
    parts = [
        "# Tests on GPUs",
        NOTICE,
        "What has run on hardware, and how it ended. `make test-gpu JUNIT=gpu.xml` runs the tests that "
        "need GPUs, `python -m tools.gpu_tests gpu.xml` keeps their outcomes under `benchmarks/results`. Of "
        "a test that ran more than once, the last time counts. Speeds: [performance.md](performance.md).",
        "## Runs",
        table(
            ("GPUs", "started (UTC)", "commit", "torch", "triton", "tests", "file"),
            [
                (
                    _machine(result),
                    result["started"].replace("T", " "),
                    f"`{result['commit']}`",
                    result["torch"],
                    result["triton"],
                    _counts(result["tests"].values()),
                    f"[{file.name}](../benchmarks/results/{file.name})",
                )
                for file, result in results
            ],
        ),
    ]
    for device, tests in latest.items():
        parts += _device(root, device, tests, runs)
    return "\n\n".join(parts) + "\n"


def _device(root: Path, device: str, tests: Tests, runs: dict[tuple[str, str], str]) -> list[str]:
    """The paragraphs about one kind of GPU. runs: by device and test, day and commit."""
    parts = [f"## {device}"]
    if combinations := _combinations(tests):
        rows = [
            (*(f"`{name}`" if name else "-" for name in names), _counts(members))
            for names, members in combinations
        ]
        parts += [
            "Combinations that tests name among their parameters (-: not named; a test of a dispatcher "
            "may go through many formats).",
            table((*COMBINATION, "tests"), rows),
        ]
    files = [
        (f"`{file}`", _purpose(root / file), _counts(tests[t] for t in members), runs[device, members[-1]])
        for file, members in sorted(_by_file(tests).items())
    ]
    parts += ["All tests, by file:", table(("file", "what it tests", "tests", "last run"), files)]
    if failed := [test for test, about in tests.items() if about["outcome"] == "failed"]:
        parts += ["Failed:", "\n".join(f"* `{test}` ({runs[device, test]})" for test in failed)]
    return parts


def _combinations(tests: Tests) -> list[tuple[tuple[str, ...], list[dict[str, str]]]]:
    found: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for about in tests.values():
        found[tuple(about.get(name, "") for name in COMBINATION)].append(about)
    return sorted((names, members) for names, members in found.items() if any(names))


def _by_file(tests: Tests) -> dict[str, list[str]]:
    files = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)
    return files


def _purpose(file: Path) -> str:
    """The first sentence of a test file's docstring, "" of a file that is no more."""
    text = ast.get_docstring(ast.parse(file.read_text())) if file.is_file() else None
    return " ".join((text or "").split("\n\n")[0].split()).replace("|", "\\|")


def _counts(tests: Iterable[dict[str, str]]) -> str:
    """As in "3 passed, 1 failed"."""
    counts = Counter(about["outcome"] for about in tests)
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts[name])


if __name__ == "__main__":
    raise SystemExit(main())
