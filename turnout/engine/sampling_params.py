"""Sampling parameters of one request. Torch-free: the server builds and validates them."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, get_type_hints

import msgspec

from turnout.errors import UserError

MAX_LOGPROBS = 20
MAX_BIAS = 100
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


class Range(NamedTuple):
    """The values from `low` to `high`, of which the lowest may be left out."""

    low: float
    high: float
    low_allowed: bool = True

    def holds(self, value: float | None) -> bool:
        """None stands for "not asked for"."""
        return value is None or (self.low <= value <= self.high and (self.low_allowed or value != self.low))

    def __str__(self) -> str:
        return f"{'[' if self.low_allowed else '('}{self.low:g}, {self.high:g}]"


RANGES = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, low_allowed=False),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 10),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to continue a prompt. Defaults follow OpenAI's completions, except that the default is greedy.

    temperature 0 is greedy. `top_k` 0 or -1 means all tokens. `logprobs` and `prompt_logprobs` give how
    many alternatives to report with each token's own log-probability (0: only its own; None: off);
    `logprob_token_ids`, if there are any, are reported with `logprobs` in place of the best ones.
    Penalties follow OpenAI (presence, frequency: over generated tokens) and CTRL (repetition: over
    prompt and generated tokens). `skip_special_tokens`: leave special tokens out of the text.
    `grammar`: the output follows it and ends where it may (turnout.engine.grammar makes one); only
    max_tokens, stop strings and stop_token_ids cut it short.
    Lists do for tuples, and one stop string for a tuple of it. Raises UserError naming the first field
    of a wrong type, or out of range.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: str = ""

    def __post_init__(self) -> None:
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            given = getattr(self, name)
            if given is default:
                continue
            try:
                value = msgspec.convert(
                    (given,) if name == "stop" and isinstance(given, str) else given, _kinds()[name]
                )
            except msgspec.ValidationError:
                raise UserError(f"{name}={given!r}: must be {self.__annotations__[name]}") from None
            msgspec.structs.force_setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise UserError naming the first field that is out of range."""
        rules: list[tuple[str, bool, str | Range]] = [
            ("max_tokens", self.max_tokens >= 0, "must be at least 0"),
            ("min_tokens", 0 <= self.min_tokens <= max(self.max_tokens, 0), "must lie in [0, max_tokens]"),
            *((name, range.holds(getattr(self, name)), range) for name, range in RANGES.items()),
            (
                "logprob_token_ids",
                self.logprobs is not None or not self.logprob_token_ids,
                "goes with logprobs, which is not given",
            ),
            ("top_k", self.top_k >= -1, "must be -1 or 0 (all) or positive"),
            ("stop", all(self.stop), "must not contain an empty string"),
            (
                "logit_bias",
                all(-MAX_BIAS <= b <= MAX_BIAS for b in self.logit_bias.values()),
                f"values must lie in [-{MAX_BIAS}, {MAX_BIAS}]",
            ),
            (
                "ignore_eos",
                not (self.ignore_eos and self.grammar),
                "an output that follows a grammar (a schema, a regular expression, choices) ends where that "
                "does; leave one of the two out",
            ),
            ("seed", self.seed is None or MIN_SEED <= self.seed <= MAX_SEED, "must fit a 64-bit integer"),
        ]
        for name, ok, rule in rules:
            if not ok or (isinstance(v := getattr(self, name), float) and not math.isfinite(v)):
                must = f"must lie in {rule}" if isinstance(rule, Range) else rule
                raise UserError(f"{name}={getattr(self, name)!r}: {must}")


@functools.cache
def _kinds() -> dict[str, Any]:
    """The type of each field."""
    return get_type_hints(SamplingParams)
