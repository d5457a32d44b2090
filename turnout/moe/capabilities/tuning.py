"""Tables that say how a runner's kernels are cut, as measured: planning passes them on unread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from turnout.moe.capabilities.rank_share import Share
from turnout.parallel.hardware import Hardware

# Tokens of a batch, ascending, and the runner's own configuration there. Empty: by the runner's rule.
TuningTable = tuple[tuple[int, Any], ...]
AGAIN = "run `turnout tune` again"  # the remedy for tables that do not hold any more
Progress = Callable[[str, int, int], None]  # what is done, how many steps of how many


class Tuning(Protocol):
    """What a runner declares whose kernels can be cut one way or another."""

    @property
    def revision(self) -> str:
        """Of its kernels: what was measured with others does not count."""
        ...

    def find(self, share: Share, hardware: Hardware, folder: Path | None) -> TuningTable:
        """The table that counts for a rank's share of a layer. folder: of this machine's own tables; None:
        only those that are shipped."""
        ...

    def explain(self, table: TuningTable, hardware: Hardware, *, deterministic: bool) -> str:
        """A line for `turnout plan`."""
        ...

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
        """Measure the table of a layer and keep it in `folder`. Raises OSError if that cannot be written.

        make_runner: the layer's runner with weights of its own, of `weight_bytes` bytes, at each call.
        batches: some of so many tokens. most: tokens of the largest batch.
        """
        ...
