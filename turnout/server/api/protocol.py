"""Request bodies: what may be asked, and how it becomes `SamplingParams`.

Strict on purpose: an unknown field, a wrong type or a value out of range is refused by name, since a
misspelt `max_token` that is ignored costs more than an error. Three kinds of OpenAI fields besides:

  * IGNORED ones cannot change the answer (`user`, `metadata`, ...) and are accepted.
  * UNSUPPORTED ones would change it. They are refused unless their value asks for nothing, because
    clients send `"tools": []` or `"suffix": null` on their own.
  * null stands for a field's default everywhere, as OpenAI's clients use it.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from turnout.engine.sampling.params import MAX_BIAS, SamplingParams
from turnout.errors import UserError
from turnout.server.api.errors import ApiError, invalid

MAX_CHOICES = 128
MAX_PROMPTS = 2048
MAX_STOP_STRINGS = 64

IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)

UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # field -> values that ask for nothing
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "tool_calls": ([],),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "refusal": (),
    "annotations": ([],),
}


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields.keys()
        return {
            name: value for name, value in data.items() if name in known or not _asks_nothing(name, value)
        }


def _asks_nothing(name: str, value: Any) -> bool:
    return name in IGNORED or (name in UNSUPPORTED and (value is None or value in UNSUPPORTED[name]))


def _prompts(value: Any) -> list[str | list[int]]:
    """One or many prompts, as text or as token ids, to a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(type(i) is int for i in item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings")
    return stops


def _bias(value: Any) -> dict[int, float]:
    """JSON object keys are strings; OpenAI's are token ids in decimal.

    Python's `int` and `float` take more than that (" 5_0", "٥", True, "1e5"), which would be guesses here.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must map token ids to numbers")
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token):
            raise ValueError(f"key {token[:20]!r} is not a token id in decimal digits")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"token {token}: the bias must be a number in [-{MAX_BIAS}, {MAX_BIAS}]")
    return {int(token): float(bias) for token, bias in value.items()}


_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")  # one spelling for each, so that no two keys mean the same token


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; we send none


class GenerationBody(Body):
    """Fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(lt=2**31)] | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias)] = {}
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, max_tokens: int, vocab_size: int) -> SamplingParams:
        """Checked parameters of one choice. Unlike offline, the default temperature is OpenAI's: 1."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _PASSED_ON}
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=self.logit_bias,
            **{name: value for name, value in given.items() if value is not None},
            **self.reported(),
        )
        try:
            params.check()
        except UserError as error:
            raise invalid(str(error), str(error).split("=", 1)[0]) from None
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            check_ids(ids, vocab_size, name)
        return params

    def reported(self) -> dict[str, Any]:
        """The log-probabilities to compute; none unless a subclass asks."""
        return {}


_PASSED_ON = (
    "min_tokens",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "ignore_eos",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class CompletionBody(GenerationBody):
    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts), Field(max_length=MAX_PROMPTS)]
    echo: bool | None = None
    logprobs: int | None = None

    def reported(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates know it: plain text, and `developer` under its older name."""
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _one_limit_and_logprobs(self) -> ChatBody:
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    def reported(self) -> dict[str, Any]:
        return {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class TokenizeBody(Body):
    """Either `prompt`, or `messages` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


B = TypeVar("B", bound=Body)


def parse(cls: type[B], raw: bytes) -> B:
    """The JSON text `raw` as a `cls`. Raises ApiError 400 naming every field that is wrong."""
    try:
        return cls.model_validate_json(raw)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=True)
        raise _refuse(cls, details) from None


def _refuse(cls: type[Body], details: list[ErrorDetails]) -> ApiError:
    first = str(details[0]["loc"][0]) if details[0]["loc"] else None
    lines = dict.fromkeys(_explain(cls, detail) for detail in details[:10])
    return invalid("; ".join(lines), first)


def _explain(cls: type[Body], detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "json_invalid":
        return f"the body is not valid JSON in UTF-8: {detail['ctx']['error']}"
    if detail["type"] == "extra_forbidden":
        name = str(detail["loc"][-1])
        if name in UNSUPPORTED:
            return f"{where}: not supported by this server"
        close = difflib.get_close_matches(name, cls.model_fields, n=1)
        return f"{where}: unknown field" + (f"; did you mean {close[0]}?" if close else "")
    if detail["type"] == "missing":
        return f"{where}: required"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def check_ids(ids: Any, vocab_size: int, param: str) -> None:
    """Raise ApiError 400 unless every token id lies in [0, vocab_size)."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(f"{param}: token id {wrong} does not lie in [0, {vocab_size})", param)
