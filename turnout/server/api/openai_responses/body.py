"""OpenAI's requests of /v1/responses, and the chat that each asks for. Nothing is kept between requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from turnout.server.api.body import Off, QueueFields
from turnout.server.api.chat import only_text, system_first
from turnout.server.api.tools import Name, Parameters


def _no_logprobs(value: Any) -> Any:
    if value not in (None, 0) or isinstance(value, bool):
        raise ValueError("no log-probabilities are returned here; ask /v1/chat/completions, or leave it out")
    return value


class Item(BaseModel):
    """What clients add of an earlier answer (`status`, `annotations`, ids) is passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextPart(Item):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


Content = str | Annotated[list[Annotated[TextPart, BeforeValidator(only_text)]], Field(fail_fast=True)]


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class FunctionOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(Item):
    type: Literal["reasoning"]
    content: list[TextPart] | None = None


def _with_type(item: Any) -> Any:
    """Of messages alone the type may be missing."""
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


AnyItem = Annotated[
    MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem,
    Field(discriminator="type"),
    BeforeValidator(_with_type),
]


class FunctionTool(Item):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None


class ServiceTool(Item):
    """Tools that OpenAI's own service runs, or that only its models can call. Agents offer them with every
    request; here the model is not told of them."""

    type: Literal[
        "apply_patch",
        "custom",
        "image_generation",
        "local_shell",
        "namespace",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
    ]


class ChosenTool(Item):
    type: Literal["function"]
    name: Name

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}


class AllowedTools(Item):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, fail_fast=True)]

    def for_chat(self) -> dict[str, Any]:
        allowed = {"mode": self.mode, "tools": [tool.for_chat() for tool in self.tools]}
        return {"type": self.type, "allowed_tools": allowed}


class ReasoningOptions(Item):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # reasoning comes as it is


class TextFormat(Item):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Item):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


def _nothing_is_kept(value: Any) -> None:
    if value is not None:
        raise ValueError("nothing is kept between requests; send the whole conversation as input")


Unkept = Annotated[None, BeforeValidator(_nothing_is_kept)]


class StreamOptions(Item):
    include_obfuscation: bool | None = None  # padding against traffic analysis; there is none


AnyTool = Annotated[FunctionTool | ServiceTool, Field(discriminator="type")]


class ResponsesBody(QueueFields):
    model: str | None = None
    input: str | Annotated[list[AnyItem], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[ChosenTool | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[Literal[0] | None, BeforeValidator(_no_logprobs)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # of answers that are kept elsewhere
    truncation: Literal["disabled"] | None = None
    background: Off | None = None
    previous_response_id: Unkept = None
    conversation: Unkept = None

    def for_chat(self) -> dict[str, Any]:
        """The fields of the chat request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tool_choice": self.tool_choice
            if isinstance(self.tool_choice, str) or self.tool_choice is None
            else self.tool_choice.for_chat(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "response_format": self._format(),
            "chat_template_kwargs": self.chat_template_kwargs,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
        }
        if self.offered:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.offered
            ]
        return fields

    @property
    def offered(self) -> list[FunctionTool]:
        """The tools that the model is told of."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    def _messages(self) -> list[dict[str, Any]]:
        """Thoughts, text and calls that follow each other are one message of the assistant."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, FunctionOutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            elif isinstance(item, MessageItem) and item.role != "assistant":
                messages.append({"role": item.role, "content": _text(item.content)})
            else:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                _add(messages[-1], item)
        return system_first(messages)

    def _format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        named = {"name": wanted.name or "answer", "schema": wanted.schema_, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": named}


def _add(message: dict[str, Any], item: AnyItem) -> None:
    if isinstance(item, FunctionCallItem):
        call = {"name": item.name, "arguments": item.arguments}
        message.setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": call}
        )
    elif isinstance(item, ReasoningItem):
        text = _text(item.content or [])
        if text:
            message["reasoning_content"] = message.get("reasoning_content", "") + text
    elif isinstance(item, MessageItem):
        message["content"] += _text(item.content)


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
