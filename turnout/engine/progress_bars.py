"""Progress on standard error, of loading a model and of answering prompts. Torch-free.

rich takes a tenth of a second to import, which processes that show no progress need not spend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from turnout.models.interface import ProgressFn


@contextmanager
def loading_bar(*, shown: bool) -> Iterator[ProgressFn]:
    """Progress of loading on a terminal; elsewhere the bar stays silent."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as bar:
        task = bar.add_task("loading", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report


@contextmanager
def counting_bar(what: str, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar of `total` things; yields what to call as each is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
