"""Holds waiting prompts back for a few steps, so that data-parallel ranks compute prompts in the same steps.

A step is one with prompts for all ranks as soon as one of them brings a prompt: it takes longer, and no
decode graph computes it. So a rank whose requests decode holds new prompts until others have prompts too.

What a rank says with the record of a step (`Prompts`) all ranks know when they schedule the next one, and so
they open that step for prompts alike: if some rank's are due, or if all ranks with work hold some. Ranks that
share requests decide alike, since no clock is read for a decision of the same step.

Nothing is held by a rank that decodes nothing, nor while the others have no work, or so few prompts that none
is likely to come in time: the first token comes as soon as without. Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import IntEnum

from turnout.vocabulary import Phase

EXPECTED = 0.5  # prompts of other ranks in `most_steps` steps; fewer are not waited for
MEMORY = 8  # times `most_steps`: the steps over which these are averaged


class Prompts(IntEnum):
    """What a rank says about prompts in its next step, by its code in a record.

    HELD: some wait for others. DUE: the next step has some, whatever others do, since they were held long
    enough or are computed in parts.
    """

    NONE = 0
    HELD = 1
    DUE = 2


class PrefillDelayer:
    """held_steps: in which prompts were held that had room to run."""

    def __init__(
        self, most_steps: int, most_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prompts are held for `most_steps` steps in a row at most, and from the second on only if a step as
        long as the last one would end within `most_seconds` of the beginning."""
        self.held_steps = 0
        self._most_steps, self._most_seconds, self._clock = most_steps, most_seconds, clock
        self._due = self._others_work = False
        self._others_prompts = 0.0  # other ranks with prompts in a step, on average
        self._held = 0  # steps in a row
        self._began = 0.0  # the first of them
        self._step_seconds, self._last = 0.0, clock()

    def heard(self, due: bool, phases: Sequence[Phase | None], own: int) -> None:
        """What the ranks agreed on: whether the next step is open for prompts, and the phase in which each
        data-parallel rank is in this one. own: which of them this is."""
        others = [phase for rank, phase in enumerate(phases) if rank != own]
        self._due, self._others_work = due, any(others)
        self._others_prompts += (others.count(Phase.PREFILL) - self._others_prompts) / (
            MEMORY * self._most_steps
        )
        now = self._clock()
        self._step_seconds, self._last = now - self._last, now

    def holds(self, decoding: int) -> bool:
        """Whether prompts that have room to run wait, where `decoding` requests decode."""
        useful = self._others_prompts * self._most_steps >= EXPECTED
        if self._due or not (decoding and self._others_work and useful):
            self._held = 0
            return False
        if not self._held:
            self._began = self._clock()
        self._held += 1
        self.held_steps += 1
        return True

    def says(self) -> Prompts:
        """About prompts that `holds` has held in the step that was just scheduled."""
        ends = self._clock() + 2 * self._step_seconds  # of the next step
        over = self._held >= self._most_steps or ends - self._began > self._most_seconds
        return Prompts.DUE if over else Prompts.HELD
