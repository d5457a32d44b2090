"""Drafts where they pay: verifying takes longer the more requests decode; what it gives depends on the text.

For batches of about the same size, tokens per second with drafts and without are measured on the steps
themselves, and the better way is taken. Now and then a few steps go the other way, since text and load
change. Ranks that share requests decide alike, by the times of the one that leads. Torch-free.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

FIRST = 32  # steps with drafts before any without
PERIOD = 512  # steps between trials of the other way
TRIAL = 8  # steps
FORGET = 0.95  # what a step counts after one more
GAIN = 1.05  # of the other way, to be taken


@dataclass
class _Sizes:
    """Batches whose sizes have as many bits. tokens, seconds: without and with drafts, old steps less."""

    drafts: bool = True
    left: int = FIRST  # steps until the trial begins, or below 1 until it ends
    tokens: list[float] = field(default_factory=lambda: [0.0, 0.0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def way(self) -> bool:
        """Whether the next step drafts."""
        return self.drafts if self.left > 0 else not self.drafts

    def rate(self, drafts: bool) -> float:
        return self.tokens[drafts] / self.seconds[drafts] if self.seconds[drafts] else 0.0


class DraftSwitch:
    """Says before a step whether it drafts, and learns what it gave."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Sizes] = {}

    def drafts(self, decoding: int) -> bool:
        """Whether a step that decodes so many requests should bring drafts."""
        return self._of(decoding).way

    def ran(self, decoding: int, way: bool, tokens: int, seconds: float) -> None:
        """A step did nothing but decode: `tokens` in `seconds`. way: whether it drafted."""
        sizes = self._of(decoding)
        sizes.tokens[way] = FORGET * sizes.tokens[way] + tokens
        sizes.seconds[way] = FORGET * sizes.seconds[way] + seconds
        sizes.left -= 1
        if sizes.left > -TRIAL:
            return
        sizes.left = PERIOD
        if sizes.rate(not sizes.drafts) > GAIN * sizes.rate(sizes.drafts):
            sizes.drafts = not sizes.drafts
            logger.info(
                "drafts %s around %d requests: %.0f tokens/s with, %.0f without",
                "are verified" if sizes.drafts else "rest",
                decoding,
                sizes.rate(True),
                sizes.rate(False),
            )

    def _of(self, decoding: int) -> _Sizes:
        return self._sizes.setdefault(decoding.bit_length(), _Sizes())
