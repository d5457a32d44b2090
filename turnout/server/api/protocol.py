"""Request bodies: what may be asked, and how it becomes `SamplingParams`.

Strict on purpose: an unknown field, a wrong type or a value out of range is refused by name, since a
misspelt `max_token` that is ignored costs more than an error. null stands for a field's default
everywhere, as OpenAI's clients use it. For fields that other engines know see `body`.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator
from pydantic_core import ErrorDetails, from_json

from turnout.engine.sampling_params import (
    MAX_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MIN_SEED,
    RANGES,
    Range,
    SamplingParams,
)
from turnout.errors import UserError
from turnout.server.api.body import UNSUPPORTED, Body, QueueFields
from turnout.server.api.chat import Messages, TemplateFields
from turnout.server.api.errors import ApiError, invalid
from turnout.server.api.sizes import MAX_PROMPTS, MAX_STOP_STRINGS, Limits, check_sizes
from turnout.server.api.structured import StructuredFields
from turnout.server.api.tools import ToolFields

MAX_CHOICES = 128
MAX_DETAILS = 10  # of what is wrong with a body
MAX_ID = 256  # characters of a request's name


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
    stops = [value] if isinstance(value, str) else [] if value is None else value
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


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_STOP = {"type": "string", "minLength": 1}
_STOPS = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]}
_BIAS = {
    "anyOf": [
        {
            "type": "object",
            "patternProperties": {
                f"^({_TOKEN_ID.pattern})$": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
            },
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}


def _within(range: Range) -> WithJsonSchema:
    """The description of a number in `range`, or null; the check itself is `SamplingParams.check`."""
    lowest = "minimum" if range.low_allowed else "exclusiveMinimum"
    bounds = {"type": "number", lowest: range.low, "maximum": range.high}
    return WithJsonSchema({"anyOf": [bounds, {"type": "null"}]})


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis; we send none


TokenId = Annotated[int, Field(ge=0)]
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class GenerationBody(StructuredFields, QueueFields):
    """Fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float | None, _within(RANGES["temperature"])] = None
    top_p: Annotated[float | None, _within(RANGES["top_p"])] = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float | None, _within(RANGES["min_p"])] = None
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops), WithJsonSchema(_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for the same
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # texts have none between them, whatever is asked
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None  # as vLLM's, see engine/stream_intervals.py
    rid: RequestId | None = None
    request_id: RequestId | None = None  # vLLM's name for the same
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias), WithJsonSchema(_BIAS)] = {}
    presence_penalty: Annotated[float | None, _within(RANGES["presence_penalty"])] = None
    frequency_penalty: Annotated[float | None, _within(RANGES["frequency_penalty"])] = None
    repetition_penalty: Annotated[float | None, _within(RANGES["repetition_penalty"])] = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed when stream is true")
        return self

    @model_validator(mode="after")
    def _one_name_and_some_prompt(self) -> GenerationBody:
        if None not in (self.rid, self.request_id) and self.rid != self.request_id:
            raise ValueError("rid and request_id differ; give one of them")
        if self.truncate_prompt_tokens == 0:
            raise ValueError(
                "truncate_prompt_tokens: must be at least 1, or -1 for as many as fit; 0 leaves no prompt"
            )
        return self

    @property
    def chosen_id(self) -> str | None:
        return self.request_id if self.rid is None else self.rid

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, max_tokens: int, vocab_size: int, grammar: str = "") -> SamplingParams:
        """Checked parameters of one choice. Unlike offline, the default temperature is OpenAI's: 1.

        grammar: what `structured.compiled` made of this body.
        """
        given: dict[str, Any] = {name: getattr(self, name) for name in _PASSED_ON}
        try:
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0 if self.temperature is None else self.temperature,
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logit_bias=self.logit_bias,
                grammar=grammar,
                include_stop_str_in_output=bool(self.include_stop_str_in_output or self.no_stop_trim),
                **{name: value for name, value in given.items() if value is not None},
                **self.reported(),
            )
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
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class CompletionBody(GenerationBody):
    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_prompts),
        Field(max_length=MAX_PROMPTS),
        WithJsonSchema(_PROMPTS),
    ]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def reported(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs, "prompt_logprobs": self.logprobs if self.echo else None}


class ChatBody(GenerationBody, TemplateFields, ToolFields):
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    separate_reasoning: bool | None = None  # false: reasoning stays in the text, marks included
    stream_reasoning: bool | None = None  # false: streamed answers hold it in one piece
    include_reasoning: bool | None = None  # false: it is left out

    @model_validator(mode="after")
    def _one_limit_and_logprobs(self) -> ChatBody:
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed when logprobs is true")
        return self

    def reported(self) -> dict[str, Any]:
        return {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class TokenizeBody(TemplateFields, ToolFields):
    """Either `prompt`, or `messages` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None and (
            self.chat_template_kwargs or self.reasoning_effort or self.continue_final_message or self.tools
        ):
            raise ValueError(
                "chat_template_kwargs, reasoning_effort, continue_final_message and tools are for messages, "
                "not for a prompt"
            )
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool | None = None


B = TypeVar("B", bound=Body)


def parse(cls: type[B], raw: bytes | bytearray, limits: Limits | None = None) -> B:
    """The JSON text `raw` as a `cls`.

    Raises ApiError 400 if something is longer than `limits` allow, else naming every field that is wrong, and
    of a list the first element that is.
    """
    try:
        data = from_json(raw)
    except ValueError as error:
        raise invalid(f"the body is not valid JSON in UTF-8: {error}") from None
    if not isinstance(data, dict):
        raise invalid("the body must be a JSON object")
    if limits is not None:
        check_sizes(data, limits)
    return validated(cls, data)


def validated(cls: type[B], data: dict[str, Any]) -> B:
    """Raises ApiError 400 naming every field that is wrong."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=True)
        raise _refuse(cls, data, details[:MAX_DETAILS]) from None


def _refuse(cls: type[Body], data: dict[str, Any], details: list[ErrorDetails]) -> ApiError:
    """Where a value may be of several shapes, what is wrong within it says more than that it has another."""
    places = [_place(detail, data) for detail in details]
    outer = {place[:length] for place in places for length in range(len(place))}
    found = [(place, detail) for place, detail in zip(places, details, strict=True) if place not in outer]
    first = str(found[0][0][0]) if found[0][0] else None
    return invalid("; ".join(dict.fromkeys(_explain(cls, *one) for one in found)), first)


def _place(detail: ErrorDetails, data: Any) -> tuple[int | str, ...]:
    """The fields and indices that lead to what is wrong, without pydantic's names of the shapes tried."""
    place: list[int | str] = []
    for part in detail["loc"]:
        if part in data if isinstance(data, dict) else isinstance(data, list) and isinstance(part, int):
            place.append(part)
            data = data[part]
    if detail["type"] in ("missing", "value_error") and detail["loc"][-1:] != tuple(place[-1:]):
        place.append(detail["loc"][-1])
    return tuple(place)


def _explain(cls: type[Body], place: tuple[int | str, ...], detail: ErrorDetails) -> str:
    where = ".".join(map(str, place))
    if detail["type"] == "extra_forbidden":
        name = str(detail["loc"][-1])
        if name in UNSUPPORTED:
            neutral = " or ".join(json.dumps(value) for value in UNSUPPORTED[name])
            remedy = f"leave it out, or send {neutral}" if neutral else "leave it out"
            return f"{where}: not supported by this server; {remedy}"
        close = difflib.get_close_matches(name, cls.model_fields, n=1) if len(place) == 1 else []
        return f"{where}: unknown field" + (f"; did you mean {close[0]}?" if close else "")
    if detail["type"] == "missing":
        return f"{where}: required"
    if detail["type"] == "union_tag_not_found":
        return f"{where}.{detail['ctx']['discriminator'].strip(_QUOTE)}: required"
    if detail["type"] == "union_tag_invalid":
        context = detail["ctx"]
        media = " (this model takes text only)" if context["tag"] in _MEDIA else ""
        wrong = f"{context['discriminator'].strip(_QUOTE)} {context['tag']!r}"
        return f"{where}: {wrong} is not one of {context['expected_tags']}{media}"
    message = _IN_JSON.get(detail["type"]) or detail["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


_QUOTE = "'"
_MEDIA = ("image", "document", "audio", "video", "input_image", "input_audio", "input_file")
_IN_JSON = {  # what pydantic says of Python's types
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
    "model_attributes_type": "Input should be an object",
    "list_type": "Input should be a valid array",
}


def check_ids(ids: Any, vocab_size: int, param: str) -> None:
    """Raise ApiError 400 unless every token id lies in [0, vocab_size)."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(f"{param}: token id {wrong} does not lie in [0, {vocab_size})", param)
