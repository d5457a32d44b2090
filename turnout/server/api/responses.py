"""The shapes of answers, for the description of the interface; `render`, `service` and `app` build them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]
closed = with_config(ConfigDict(extra="forbid"))  # no field but those named


@closed
class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


@closed
class Error(TypedDict):
    error: ErrorDetail


@closed
class AnthropicErrorDetail(TypedDict):
    type: str
    message: str


@closed
class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail


@closed
class Status(TypedDict):
    status: Literal["ok", "ready", "restarting", "profiling"]


@closed
class Trace(TypedDict):
    """Chrome's format."""

    displayTimeUnit: str
    traceEvents: list[dict[str, Any]]


@closed
class Version(TypedDict):
    version: str


@closed
class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


@closed
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class ServerInfo(TypedDict):
    """More stands in it than is named here, and changes between versions."""

    version: str
    model: str
    state: Literal["loading", "ready", "restarting", "draining", "failed"]
    config: dict[str, Any]
    ranks: list[dict[str, Any]]


@closed
class Load(TypedDict):
    server_load: int
    running: int
    waiting: int


@closed
class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    architectures: list[str]
    vocab_size: int | None
    max_context_length: int | None
    max_req_input_len: int | None
    eos_token_ids: list[int]
    weight_version: str
    preferred_sampling_params: None


@closed
class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int


@closed
class Text(TypedDict):
    prompt: str


@closed
class CachedTokens(TypedDict):
    cached_tokens: int


@closed
class ReasoningTokens(TypedDict):
    reasoning_tokens: int


@closed
class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]


@closed
class Scores(TypedDict):
    object: Literal["scoring"]
    model: str
    scores: list[list[float]]
    usage: Usage


@closed
class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@closed
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


@closed
class CompletionPart(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


@closed
class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


@closed
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


@closed
class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


@closed
class CalledFunction(TypedDict):
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


@closed
class Call(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


@closed
class AnswerMessage(TypedDict):
    """`content` is null where there are calls and no text. Both names of reasoning hold the same."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


@closed
class ChatChoice(TypedDict):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


@closed
class FunctionPart(TypedDict):
    name: NotRequired[str]
    arguments: str


@closed
class CallPart(TypedDict):
    """The first of an `index` has id, type and name, those after it only more of the arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionPart


@closed
class MessagePart(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[CallPart]]


@closed
class ChatPart(TypedDict):
    index: int
    delta: MessagePart
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


@closed
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@closed
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


@closed
class CompletionChunk(TypedDict):
    """`usage` only with stream_options.include_usage: null but in the last one, which has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionPart]
    usage: NotRequired[Usage | None]


@closed
class ChatCompletionChunk(TypedDict):
    """`usage` only with stream_options.include_usage: null but in the last one, which has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatPart]
    usage: NotRequired[Usage | None]
