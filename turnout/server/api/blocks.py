"""An answer as numbered blocks that open, grow and close one after another, as newer protocols stream it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from turnout.server.api.parsing.parts import Arguments, Call, Part, merged


@dataclass(frozen=True, slots=True)
class Step:
    """part: of "more" what is new, of "open" its first part, of "close" the whole block."""

    what: Literal["open", "more", "close"]
    index: int
    part: Part


class Blocks:
    def __init__(self) -> None:
        self._index = -1
        self._present: list[Part] = []  # of the open block

    def push(self, parts: Sequence[Part]) -> list[Step]:
        steps: list[Step] = []
        for part in merged(parts):
            goes_on = isinstance(part, Arguments) or (
                self._present and type(self._present[0]) is type(part) is not Call
            )
            if self._present and not goes_on:
                steps += self.end()
            if not self._present:
                self._index += 1
                steps.append(Step("open", self._index, part))
            self._present.append(part)
            steps.append(Step("more", self._index, part))
        return steps

    def end(self) -> list[Step]:
        """Close what is open."""
        if not self._present:
            return []
        (whole,) = merged(self._present)
        self._present = []
        return [Step("close", self._index, whole)]
