"""The generated documentation is what the code declares now, and being out of date is noticed."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tools.headline import headline
from tools.performance import tables
from tools.pictures import pictures
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.registry import ARCHITECTURES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_documentation_is_current(generator):
    assert generator.main(["--check"]) == 0, "run: python -m tools.generate_docs"


def test_what_is_out_of_date_is_noticed_and_fixed(generator, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    blocks = [
        f"{generator.BEGIN.format(name)}\nold\n{generator.END}\n\n" for name in ("architectures", "support")
    ]
    readme.write_text(f"# Title\n\n{''.join(blocks)}the rest\n")
    assert generator.main(["--check"], root=tmp_path) == 1
    assert "old" in readme.read_text()
    assert generator.main([], root=tmp_path) == 0
    assert generator.main(["--check"], root=tmp_path) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith(f"{generator.END}\n\nthe rest\n")
    for name in (*ARCHITECTURES, *RUNNERS, *DISPATCHERS):
        assert f"`{name}`" in text
    (tmp_path / "docs" / "backends.md").write_text("edited by hand")
    assert generator.main(["--check"], root=tmp_path) == 1
    assert "docs/backends.md: out of date" in capsys.readouterr().err


def test_tables_are_rectangular(generator):
    for text in (generator.backends(), generator.formats(), generator.support()):
        for block in text.split("\n\n"):
            if block.startswith("|"):
                assert len({line.count(" | ") for line in block.splitlines()}) == 1


def test_results_are_shown_as_they_were_measured(generator, tmp_path):
    """A ratio is the best peer's time over our best; efficiency and times come from the rows."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "performance.md"
    page.write_text(f"{generator.BEGIN.format('moe-cpu')}\nold\n{generator.END}\n")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    row = {"shape": "s", "format": "nvfp4", "tokens": 16, "compute_dtype": "float32", "error": 0.0}
    rows = [
        row | {"runner": "torch", "peer": False, "time_us": 2000.0},
        row | {"runner": "transformers a", "peer": True, "time_us": 9000.0},
        row | {"runner": "transformers b", "peer": True, "time_us": 5000.0},
        row | {"runner": "transformers c", "peer": True, "error_message": "failed"},
    ]
    head = {"device": "AMD", "driver": "", "versions": {"torch": "1"}, "date": "d", "commit": "abc"}
    (results / "moe-amd-d.json").write_text(json.dumps(head | {"rows": rows}))
    assert generator.main([], root=tmp_path) == 0
    assert "| AMD | nvfp4 |  | 2.00 (2.50x) |  |" in page.read_text()
    assert "commit `abc`" in page.read_text()
    units = {"device": "Intel", "processor": "Intel", "bf16_units": "amx_bf16"}
    more = [row | {"runner": "torch", "peer": False, "time_us": 1000.0}, *rows[1:]]
    (results / "moe-intel-d.json").write_text(json.dumps(head | units | {"rows": more}))
    assert generator.main([], root=tmp_path) == 0
    assert "| AMD | nvfp4 |  | 2.00 (2.50x) |  |" in page.read_text()
    assert "| Intel (bf16 units: amx_bf16) | nvfp4 |  | 1.00 (5.00x) |  |" in page.read_text()
    assert "Intel (bf16 units: amx_bf16); torch 1" in page.read_text()


def test_the_newest_run_of_a_load_counts_and_runs_that_compare_settings_do_not(generator, tmp_path):
    """A page of notes, one folder deeper, links to the same files."""
    (tmp_path / "docs" / "notes").mkdir(parents=True)
    pages = [tmp_path / "docs" / "performance.md", tmp_path / "docs" / "notes" / "some.md"]
    for page in pages:
        page.write_text(f"{generator.BEGIN.format('serve-h200')}\nold\n{generator.END}\n")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    load = {"model": "m fp8", "input_len": 1024, "output_len": 128, "max_concurrency": 8}
    times = {"median_ttft_ms": 5.0, "p99_ttft_ms": 7.0, "median_tpot_ms": 1.0}
    for name, date, rates in (
        ("serve-m-nvidia-h200", "2026-01-03", (40.0, 50.0)),
        ("serve-nvidia-h200", "2026-01-01", (10.0,)),
        ("serve-nvidia-h200", "2026-01-02", (20.0,)),
        ("serve-schedules-nvidia-h200", "2026-01-04", (60.0,)),
    ):
        rows = [load | times | {"output_throughput": rate} for rate in rates]
        content = {"date": date, "devices": 1, "rows": rows}
        (results / f"{name}-{date}.json").write_text(json.dumps(content))
    assert generator.main([], root=tmp_path) == 0
    for page, up in zip(pages, ("..", "../.."), strict=True):
        link = f"[2026-01-03]({up}/benchmarks/results/serve-m-nvidia-h200-2026-01-03.json)"
        rows = [line for line in page.read_text().splitlines() if line.startswith("| m fp8")]
        assert rows == [f"| m fp8 | 1 | 1,024 / 128 | 8 | 50 | 5 | 7 | 1.00 | {link} |"]


def test_an_exchange_is_shown_next_to_gathering(generator, tmp_path):
    """By the newest run that has both: a newer one without `none` compares with nothing."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    row = {"dispatcher": "nvlink", "devices": 4, "hidden": 64, "topk": 2, "experts": 8, "routing": "uniform"}
    row |= {"combine_format": "bf16", "wire_bytes": 100, "dispatch_us": 4.0, "combine_us": 3.0}
    row |= {"raw_dispatch_us": 8.0, "raw_combine_us": 4.0, "graph_us": 5.0}
    none = row | {"dispatcher": "none", "format": "bf16", "graph_us": 20.0, "raw_graph_us": 15.0}
    head = {"device": "NVIDIA H200", "devices": 4, "driver": "", "versions": {}, "commit": "abc"}
    for date, rows in (
        ("2026-01-01", [row | {"format": "bf16"}, none]),
        ("2026-01-02", [row | {"format": format, "graph_us": 6.0} for format in ("bf16", "fp8")]),
    ):
        rows = [row | {"tokens": tokens} for row in rows for tokens in (1, 128, 4096)]
        content = head | {"date": date, "rows": rows}
        (results / f"a2a-nvlink-nvidia-h200-x4-{date}.json").write_text(json.dumps(content))
    found = tables(results, tmp_path)
    both = found["a2a-nvlink-x4-h200"]
    assert "2026-01-01" in both
    assert "| uniform | bf16 | bf16 | 1 | 5.0 | 20.0 | 15.0 | 3.00 | 0.00 | 0 |" in both
    assert "| 5.0 us | 20.0 us (NCCL) | 4.00 |" in headline(results)


def test_every_result_stands_on_one_page_and_every_page_asks_for_one_that_exists(generator):
    pages = [ROOT / "docs" / "performance.md", *sorted((ROOT / "docs" / "notes").glob("*.md"))]
    asked = [name for page in pages for name in re.findall(r"<!-- generated: (.+?) -->", page.read_text())]
    results = tables(ROOT / "benchmarks" / "results", ROOT / "turnout" / "assets" / "tuning")
    assert sorted(asked) == sorted(results)


def test_every_result_says_what_it_is_of_and_names_no_folder_of_a_machine():
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        text = file.read_text()
        content = json.loads(text)
        assert content["device"], file.name
        assert content.get("date") or content["started"], file.name
        assert "commit" in content or "servers" in content, file.name  # of peers: their versions
        assert not re.search(r"/(tmp|root|home|work)/", text), file.name


def test_pictures_are_those_of_the_results():
    for path, content in pictures(ROOT).items():
        assert path.read_text() == content, f"run: python -m tools.pictures ({path.name})"
