"""How long steps take, learned from those that were run, and how many prompt tokens a target leaves room for.

A step takes `base` seconds, `row` more for each request that decodes and `token` more for each prompt token.
The first two are fitted to steps without prompts, the last to what steps with prompts took beyond that; old
steps count less and less, so the estimates follow contexts that grow and machines that others share. A change
of speed moves the first two at once, since steps before and after it fit no line together. `token` falls as
chunks grow, since few tokens read as many weights as many; so does the estimate, chunk by chunk, and a chunk
counts by the square of how much it took of the room for prompts. What was measured before any request came
(warmup.py) is where estimates begin. Torch-free.
"""

from __future__ import annotations

import logging
import math

logger = logging.getLogger(__name__)

FORGET = 0.98  # what a step counts after one more
LEARN = 0.3  # how far a step with prompts moves the estimate per token
MARGIN = 0.9  # of the target; the rest is for what the estimates miss
FIRST_TOKENS = 128  # of prompts, next to requests that decode, while their time is unknown
LEAST_TOKENS = 16  # of prompts in any step, so that they get on under a target that no step meets


class StepTimes:
    """Sizes the prompt share of steps so that requests that decode get a token every `target` seconds."""

    def __init__(self, target: float) -> None:
        self.target = target
        self._steps = self._decoding = self._prompt = 0  # launched since the last reading
        self._last: float | None = None
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0
        self._token = math.nan
        self._longest = 0  # most prompt tokens of a step so far
        self._asked = 1  # prompt tokens that the last step next to requests that decode had room for
        self._warned = 0.0

    def launched(self, decoding: int, prompt: int) -> None:
        """A step of so many decoding requests and prompt tokens is being computed."""
        self._steps, self._decoding = self._steps + 1, self._decoding + decoding
        self._prompt += prompt

    def read(self, now: float) -> None:
        """Everything launched had been computed at `now`, in seconds of any clock."""
        if self._last is not None and self._steps:
            if not self._prompt:
                self._rescale(now - self._last)
            self._learn(now - self._last)
        self._last = now
        self._steps = self._decoding = self._prompt = 0

    def measured(self, decoding: int, prompt: int, seconds: float) -> None:
        """A step that was run by itself, for its time."""
        self._steps, self._decoding, self._prompt = 1, decoding, prompt
        self._learn(seconds)
        self._steps = self._decoding = self._prompt = 0

    def rest(self, now: float) -> None:
        """Nothing was being computed up to `now`."""
        self._last = now
        self._steps = self._decoding = self._prompt = 0

    def decode_seconds(self, decoding: int, steps: int = 1) -> float:
        """Of `steps` that decode so many requests in all; 0 before any was seen."""
        if not self._weight:
            return 0.0
        mean, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean**2
        row = max(0.0, (self._products / self._weight - mean * seconds) / spread) if spread > 1e-6 else 0.0
        return max(0.0, seconds - row * mean) * steps + row * decoding

    def prompt_tokens(self, decoding: int, most: int) -> int:
        """Of a step that also decodes `decoding` requests: as many as the target leaves time for."""
        if not decoding:
            return most
        room = MARGIN * self.target - self.decode_seconds(decoding)
        if room <= 0:
            self._warn(decoding)
        if math.isnan(self._token):
            return min(most, FIRST_TOKENS)
        tokens = room / max(self._token, 1e-9)
        self._asked = min(most, int(max(LEAST_TOKENS, min(tokens, 2 * self._longest))))
        return self._asked

    def _rescale(self, seconds: float) -> None:
        """What was learned of decoding, to the speed of a step without prompts that took so long. Otherwise a
        machine that slows down while more requests come would seem to owe it to their number."""
        if expected := self.decode_seconds(self._decoding, self._steps):
            scale = 1 + LEARN * (min(seconds / expected, 2.0) - 1)  # a pause of the host is no new speed
            self._seconds *= scale
            self._products *= scale

    def _learn(self, seconds: float) -> None:
        if self._prompt:
            beyond = max(0.0, seconds - self.decode_seconds(self._decoding, self._steps)) / self._prompt
            # A short prompt says little of a step that is full of them, and noise is large for each token.
            learned = LEARN * min(1.0, self._prompt / (self._steps * self._asked)) ** 2
            known = not math.isnan(self._token)
            self._token = (1 - learned) * self._token + learned * beyond if known else beyond
            self._longest = max(self._longest, self._prompt // self._steps)
        else:
            rows, seconds = self._decoding / self._steps, seconds / self._steps
            self._weight = FORGET * self._weight + 1
            self._rows = FORGET * self._rows + rows
            self._seconds = FORGET * self._seconds + seconds
            self._squares = FORGET * self._squares + rows**2
            self._products = FORGET * self._products + rows * seconds

    def _warn(self, decoding: int) -> None:
        """Once, and again when steps without prompts take half as long again."""
        seconds = self.decode_seconds(decoding)
        if seconds > self.target and seconds > 1.5 * self._warned:
            self._warned = seconds
            logger.warning(
                "--target-tpot %g: no step meets it: decoding %d requests takes %.3g ms without a prompt; "
                "prompts get on by %d tokens a step. Raise it, or lower --max-running-requests",
                1000 * self.target,
                decoding,
                1000 * seconds,
                LEAST_TOKENS,
            )
