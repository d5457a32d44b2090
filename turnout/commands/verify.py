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
    config: Config,
    *,
    layers: str = "",
    seed: int = 0,
    show_all: bool = False,
    as_json: bool = False,
    console: Console | None = None,
) -> int:
    """Check and print; the exit code, 1 if anything fails.

    layers: "first", "all", or indices such as "0,3"; by default the first MoE layer and the last. show_all:
    list what was refused, which is otherwise counted.
    Raises UserError for a model that cannot be found, described or read, PlanRefused if nothing can run it.
    """
    with loading_bar(shown=config.load_progress) as progress:
        report = examine(config, layers=layers, seed=seed, progress=progress)
    console = console or Console()
    if as_json:
        console.file.write(json.dumps(report.describe(), indent=2) + "\n")
    else:
        _print(console, report, show_all=show_all)
    return 0 if report.passed else FAILED


def _print(console: Console, report: Report, *, show_all: bool) -> None:
    """The verdict first, then what it rests on."""
    described = report.describe()
    console.print(
        Text(
            f"{described['model']}: {described['weight_format']} experts on {described['device']}, computing "
            f"in {described['compute_dtype']}"
        )
    )
    _print_verdict(console, report)
    least = (
        f" (the budget allows {described['budget_tokens']}; a CPU is checked up to {report.most})"
        if report.most < described["budget_tokens"]
        else ""
    )
    console.print(
        Text(
            f"Inputs of the layers: {report.inputs}; batches of up to {report.most} tokens{least}.\n"
            "Relative error by batch, the largest of layers "
            f"{', '.join(map(str, report.layers))}, and its bound. Under bits, what gives the same ones: "
            "r repeating a batch, g a CUDA graph, c another batch"
        )
    )
    for pair in dict.fromkeys((one.runner, one.dispatcher) for one in report.checked):
        console.print(_table([one for one in report.checked if (one.runner, one.dispatcher) == pair]))
    _print_refused(console, report, show_all=show_all)


def _print_verdict(console: Console, report: Report) -> None:
    """Whether all passed, what failed, and how far the rest is from its bounds."""
    results = [result for one in report.checked for result in one.results]
    failed, logits = failures(report.checked), report.logits
    for line in failed:
        console.print(Text(f"FAILED {line}", style="bold red"))
    settings = len({one.setting for one in report.checked})
    console.print(
        Text(f"passed: {len(results)} batches of {settings} settings, and the logits", style="bold green")
        if report.passed
        else Text(f"failed: {len(failed)} of {len(results)} batches", style="bold red")
    )
    if near := _nearest(report.checked):
        one, result, share = near
        console.print(
            Text(
                f"  experts: at most {share:.2%} of the bound: error {result.error:.1e} of "
                f"{result.bound:.0e} ({one.setting}, layer {one.layer}, batch {result.batch})"
            )
        )
    console.print(
        Text(
            f"  logits of {logits.tokens} tokens against a float32 forward with the oracle's experts: "
            f"{logits.error / logits.bound:.2%} of the bound: error {logits.error:.1e} of "
            f"{logits.bound:.0e}; the same best token at {logits.agreeing:.1%}: "
        )
        + (Text("passed", style="green") if logits.passed else Text("FAILED", style="bold red"))
    )


def _nearest(checked: Sequence[Checked]) -> tuple[Checked, Result, float] | None:
    """Of what passed, the result nearest to its bound, and what share of the bound its error is."""
    passed = [
        (one, result, result.error / result.bound)
        for one in checked
        for result in one.results
        if result.passed and result.error is not None
    ]
    return max(passed, key=lambda found: found[2], default=None)


def _print_refused(console: Console, report: Report, *, show_all: bool) -> None:
    if not report.refused:
        return
    if not show_all:
        backends = len({refusal.who for refusal in report.refused})
        console.print(
            Text(
                f"Not run: {len(report.refused)} refusals of {backends} backends and flags that this machine "
                "or model does not allow; --all lists them"
            )
        )
        return
    console.print("Not run, for it is refused", style="bold")
    for refusal in report.refused:
        console.print(Text(f"  - {refusal.who}: {refusal.asked}: {refusal.limit}"))


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
