"""`turnout verify`: check what this machine computes with a model's weights, and print what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnout.config import Config
from turnout.engine.progress_bars import loading_bar
from turnout.engine.selfcheck import Checked, failures
from turnout.engine.verify import Report, examine
from turnout.moe.verify import Result

FAILED = 1  # exit code


def verify(
    config: Config, *, layers: str = "", seed: int = 0, as_json: bool = False, console: Console | None = None
) -> int:
    """Check and print; the exit code, 1 if anything fails.

    layers: "first", "all", or indices such as "0,3"; by default the first MoE layer and the last.
    Raises UserError for a model that cannot be found, described or read, PlanRefused if nothing can run it.
    """
    with loading_bar(shown=config.load_progress) as progress:
        report = examine(config, layers=layers, seed=seed, progress=progress)
    console = console or Console()
    if as_json:
        console.file.write(json.dumps(report.describe(), indent=2) + "\n")
    else:
        _print(console, report)
    return 0 if report.passed else FAILED


def _print(console: Console, report: Report) -> None:
    described = report.describe()
    lines = [
        f"{described['model']}: {described['weight_format']} experts on {described['device']}, computing in "
        f"{described['compute_dtype']}",
        f"inputs of the layers: {report.inputs}; batches of up to {report.most} tokens"
        + (
            f" (the budget allows {described['budget_tokens']}; a CPU is checked up to {report.most})"
            if report.most < described["budget_tokens"]
            else ""
        ),
    ]
    for line in lines:
        console.print(Text(line))
    console.print(
        Text(
            "Below: relative error by batch, the largest of layers "
            f"{', '.join(map(str, report.layers))}, and its bound. Under bits, what gives the same ones: "
            "r repeating a batch, g a CUDA graph, c other company"
        )
    )
    for pair in dict.fromkeys((one.runner, one.dispatcher) for one in report.checked):
        console.print(_table([one for one in report.checked if (one.runner, one.dispatcher) == pair]))
    logits = report.logits
    verdict = Text("passed", style="green") if logits.passed else Text("FAILED", style="bold red")
    console.print(
        Text(
            f"Logits of {logits.tokens} tokens against a float32 forward with the oracle's experts: error "
            f"{logits.error:.1e}, at most {logits.bound:.0e} allowed; the same best token at "
            f"{logits.agreeing:.1%}: "
        )
        + verdict
    )
    if report.refused:
        console.print("Not run, for it is refused", style="bold")
        for refusal in report.refused:
            console.print(Text(f"  - {refusal.who}: {refusal.asked}: {refusal.limit}"))
    for line in failures(report.checked):
        console.print(Text(f"FAILED {line}", style="bold red"))
    total = sum(len(one.results) for one in report.checked)
    console.print(
        Text(f"passed: {total} batches and the logits", style="bold green")
        if report.passed
        else Text(f"failed: {len(failures(report.checked))} of {total} batches", style="bold red")
    )


def _table(checked: Sequence[Checked]) -> Table:
    """For one runner and dispatcher: a row per setting, and under each batch the largest error of a layer."""
    names = list(dict.fromkeys(r.batch for one in checked for r in one.results if r.batch != "any"))
    table = Table(
        title=f"runner {checked[0].runner}, dispatcher {checked[0].dispatcher}",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for name in ("GEMMs", "weights"):
        table.add_column(name)
    for name in (*names, "bound", "bits"):
        table.add_column(name, justify="right")
    settings = dict.fromkeys((one.activation_format, one.weight_storage) for one in checked)
    for setting in settings:
        alike = [one for one in checked if (one.activation_format, one.weight_storage) == setting]
        results = [result for one in alike for result in one.results]
        cells = [_cell([result for result in results if result.batch == name]) for name in names]
        table.add_row(*setting, *cells, f"{results[0].bound:.0e}", _bits(results))
    return table


def _cell(results: Sequence[Result]) -> Text:
    """One batch on all layers."""
    errors = [result.error for result in results if result.error is not None]
    shown = f"{max(errors):.0e}" if any(errors) else "0" if errors else "-"
    return Text(shown) if all(result.passed for result in results) else Text("FAIL", style="bold red")


def _bits(results: Sequence[Result]) -> str:
    """Which promises beyond accuracy were tried."""
    promises = {"r": "repeats", "g": "replays", "c": "independent"}
    tried = [key for key, name in promises.items() if any(getattr(r, name) is not None for r in results)]
    return " ".join(tried) or "-"
