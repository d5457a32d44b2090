"""`turnout quantize`: write a checkpoint in another format, with progress bars."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from turnout.checkpoint import locate
from turnout.checkpoint import quantize as writing
from turnout.checkpoint.locate import require_folder
from turnout.engine.calibration import Sample, calibrate
from turnout.errors import UserError
from turnout.evals.calibration import load_samples
from turnout.models.interface import ProgressFn
from turnout.vocabulary import Format


def run(model: str, out: Path, format: str, *, calibrate: bool, calibration: Path | None) -> None:
    """Quantise, and say where. calibration: text to find activation scales with; None: word problems."""
    wanted = calibrate and format == Format.NVFP4
    if calibration and not wanted:
        raise UserError("--calibration is for --format nvfp4 with --calibrate")
    quantize(model, out, format, samples=load_samples(calibration) if wanted else None)
    sys.stdout.write(f"wrote {out}\n")


def quantize(model: str, out: Path, format: str, *, samples: Sequence[Sample] | None = None) -> None:
    """Write `model` to the new folder `out` with its experts in `format`, with a progress bar.

    samples: what to run an unquantised model on to find NVFP4 activation scales (W4A4); None: quantise
    weights alone. Raises UserError, before any work, for what `checkpoint.quantize` refuses.
    """
    source = locate(model)
    require_folder(source)
    with _Bars() as bars:
        calibration = None if samples is None else lambda: calibrate(model, samples, bars.reporter())
        writing.quantize(source, out, format, calibration=calibration, progress=bars.reporter("quantising"))


class _Bars:
    """Progress on standard error, from the first report on: a refusal comes without bars."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.tasks:
            self._progress.stop()

    def reporter(self, title: str | None = None) -> ProgressFn:
        """Shows reports as a bar for each `what`, or as one called `title`."""
        bars: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            name = title or what
            if name not in bars:
                self._progress.start()
                bars[name] = self._progress.add_task(name)
            self._progress.update(bars[name], completed=done, total=total)

        return report
