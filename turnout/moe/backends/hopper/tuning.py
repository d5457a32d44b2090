"""What planning and `turnout tune` ask of tables of tilings, without knowing what is in them.

No torch here, but in `measure`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

from turnout.moe.backends.hopper import tuning_tables
from turnout.moe.backends.hopper.layer_shape import REVISIONS
from turnout.moe.backends.hopper.workspace import layer_shape
from turnout.moe.capabilities.rank_share import Share
from turnout.moe.capabilities.tuning import Progress, TuningTable
from turnout.parallel.hardware import Hardware, copies_beyond_cache


class HopperTuning:
    """A `capabilities.tuning.Tuning`."""

    @property
    def revision(self) -> str:
        return ", ".join(f"{kernel} {revision}" for kernel, revision in REVISIONS.items())

    def find(self, share: Share, hardware: Hardware, folder: Path | None) -> TuningTable:
        return tuning_tables.find(layer_shape(share), hardware, folder)

    def explain(self, table: TuningTable, hardware: Hardware, *, deterministic: bool) -> str:
        if table:
            sizes = ", ".join(str(tokens) for tokens, _ in table)
            return f"tilings as measured on {hardware.name} for batches of {sizes} tokens"
        if deterministic:
            return "tilings by rule, the same on every machine, for --deterministic"
        return "tilings by rule: none were measured for this layer here; `turnout tune` does"

    def measure(
        self,
        make_runner: Callable[[], Any],
        batches: Callable[[int], Sequence[Any]],
        *,
        weight_bytes: int,
        most: int,
        hardware: Hardware,
        folder: Path,
        progress: Progress,
    ) -> TuningTable:
        from turnout.kernels.common.compilation import compilers, submit
        from turnout.moe.backends.hopper.autotune import tile_times, to_compile

        runners = [make_runner() for _ in range(copies_beyond_cache(weight_bytes))]
        with compilers() as pool:
            jobs = submit(pool, to_compile(runners[0], batches, most))
            for done, _ in enumerate(as_completed(jobs)):
                progress("compiling kernels", done + 1, len(jobs))
        entries = tile_times(runners, batches, most, lambda done, of: progress("timing tilings", done, of))
        table = tuning_tables.Table.now(runners[0].shape, entries)
        content = tuning_tables.TileFile(
            device=hardware.name, versions=tuning_tables.versions(), tables=(table,)
        )
        tuning_tables.write(tuning_tables.path(folder, table.shape, hardware), content)
        return tuple((entry.tokens, entry.tiles) for entry in entries)
