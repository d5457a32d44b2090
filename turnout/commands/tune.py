"""`turnout tune`: time the runners on the model's own layer, and print what was found."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnout.config import Config
from turnout.engine.engine_plan import resolve
from turnout.engine.progress_bars import loading_bar
from turnout.engine.tune import tune as measure
from turnout.moe.planning.measured import Measured
from turnout.moe.planning.runner_by_batch_size import means


def tune(config: Config, *, as_json: bool = False, console: Console | None = None) -> int:
    """Measure, keep and print; the exit code. Raises UserError, PlanRefused if nothing can run."""
    console = console or Console()
    with loading_bar(shown=config.load_progress) as progress:
        tuned = measure(config, progress)
    found = tuned.measured
    if as_json:
        content = {"file": str(tuned.file), "layer": found.layer, "microseconds": found.microseconds}
        console.file.write(json.dumps(content | {"mean": means(found.microseconds)}, indent=2) + "\n")
        return 0
    console.print(_table(found))
    for refusal in tuned.refused:
        console.print(Text(f"not measured: {refusal.who}: {refusal.asked}: {refusal.limit}"))
    chosen = resolve(config).plan
    console.print(
        Text(f"`auto` now takes runner {chosen.prefill.runner} for this layer; kept in {tuned.file}")
    )
    if chosen.runner_by_batch_size:
        console.print(Text(next(line for line in chosen.reasons if line.startswith("batches of "))))
    return 0


def _table(found: Measured) -> Table:
    sizes = next(iter(found.microseconds.values()))
    table = Table(title="us of a layer's experts, by tokens of the batch", title_justify="left", box=None)
    table.add_column("runner")
    for name in (*map(str, sizes), "mean"):
        table.add_column(name, justify="right")
    for runner, mean in sorted(means(found.microseconds).items(), key=lambda item: item[1]):
        row = found.microseconds[runner]
        table.add_row(runner, *(f"{row[tokens]:.0f}" for tokens in sizes), f"{mean:.0f}")
    return table
