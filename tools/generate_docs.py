"""Write the parts of the documentation that are facts of the code or of results: docs/backends.md,
docs/formats.md, docs/interface.md, docs/metrics.md, docs/gpu-tests.md, docs/grafana.json, and between their
markers the tables of support, architectures and GPUs in README.md, the error bounds in docs/operations.md
and the results in docs/performance.md and docs/notes.

    python -m tools.generate_docs            write what is out of date
    python -m tools.generate_docs --check    exit with 1 if anything is (a test runs this)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tools import gpu_tests, interface, launchers
from tools.architectures import architectures
from tools.backend_tables import backends, dispatchers, runners
from tools.command_line import parser_for
from tools.fitting import fitting
from tools.format_tables import WRITERS, formats
from tools.grafana import grafana
from tools.headline import headline
from tools.performance import tables
from tools.proven import backends_run, with_runs
from tools.tables import NOTICE, code, table
from turnout.formats.spec import FORMATS
from turnout.moe.accuracy import BOUNDS
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.parallel.hardware import PRESETS
from turnout.server.metric_list import METRICS, Group

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- generated: {} -->", "<!-- end generated -->"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    check = parser.parse_args(arguments).check
    stale = {
        path: text for path, text in wanted(root).items() if not path.is_file() or path.read_text() != text
    }
    for path, text in stale.items():
        sys.stderr.write(f"{path.relative_to(root)}: {'out of date' if check else 'written'}\n")
        if not check:
            path.write_text(text)
    if check and stale:
        sys.stderr.write("run: python -m tools.generate_docs\n")
    return int(check and bool(stale))


def wanted(root: Path) -> dict[Path, str]:
    """What each generated file should hold. A page without markers stays as it is."""
    names = {name: name for name in (*RUNNERS, *DISPATCHERS)} | RUNNERS.aliases | DISPATCHERS.aliases
    runs = backends_run(root / "benchmarks" / "results", names)
    files = {
        root / "docs" / "backends.md": backends(runs),
        root / "docs" / "formats.md": formats(),
        root / "docs" / "interface.md": interface.page(NOTICE),
        root / "docs" / "metrics.md": metrics(),
        root / "docs" / "gpu-tests.md": gpu_tests.page(root),
        root / "docs" / "grafana.json": grafana(),
    }
    table_of_runs = root / "turnout" / "moe" / "planning" / "hardware_evidence.py"
    if table_of_runs.is_file():
        files[table_of_runs] = with_runs(table_of_runs.read_text(), runs)
    results = tables(root / "benchmarks" / "results", root / "turnout" / "assets" / "tuning")
    deeper = {name: body.replace("](../", "](../../") for name, body in results.items()}
    notes = sorted((root / "docs" / "notes").glob("*.md"))
    blocks = {
        root / "README.md": {
            "support": support(),
            "architectures": architectures(ROOT / "tests" / "models" / "published"),
            "fitting": fitting(ROOT / "tests" / "models" / "published"),
            "headline": headline(root / "benchmarks" / "results"),
        },
        root / "docs" / "operations.md": {
            "bounds": bounds(),
            "launchers": launchers.in_words(ROOT / "benchmarks" / "results"),
        },
        root / "docs" / "performance.md": results,
        **dict.fromkeys(notes, deeper),
    }
    for page, bodies in blocks.items():
        if page.is_file():
            files[page] = _filled(page.read_text(), bodies)
    return files


def metrics() -> str:
    """docs/metrics.md."""
    parts = [
        "# Metrics",
        NOTICE,
        "What `GET /metrics` says, in Prometheus' text format. What to watch, and what it means: "
        "[operations.md](operations.md#metrics).",
    ]
    for group in Group:
        rows = [
            (
                f"`{metric.series}`",
                metric.kind,
                ", ".join(f"`{label}`" for label in metric.labels),
                metric.help,
            )
            for metric in METRICS
            if metric.group == group
        ]
        parts += [f"## {group}", table(("metric", "kind", "labels", "what it says"), rows)]
    return "\n\n".join(parts) + "\n"


def _filled(text: str, bodies: dict[str, str]) -> str:
    """`text` with each body between the markers of its name, where it has them."""
    for name, body in bodies.items():
        begin = BEGIN.format(name)
        if begin in text and END in text.partition(begin)[2]:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{body}\n{END}{rest.partition(END)[2]}"
    return text


def bounds() -> str:
    return table(
        ("GEMMs multiply with", "computing in", "largest relative error"),
        [
            ("plain numbers" if activations == "bf16" else f"{activations} activations", dtype, f"{most:.0e}")
            for (activations, dtype), most in BOUNDS.items()
        ],
    )


def support() -> str:
    return table(
        ("", "in this version"),
        [
            ("checkpoints", "; ".join(f"**{f}**: {WRITERS[f]}" for f in FORMATS)),
            ("runners", "; ".join(f"`{r.name}`: {r.summary}" for r in runners())),
            ("dispatchers", "; ".join(f"`{d.name}`: {d.summary}" for d in dispatchers())),
            ("plans for", "`cpu`, " + code(PRESETS)),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
