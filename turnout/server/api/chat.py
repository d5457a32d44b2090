"""Conversations: messages, and what a request may tell the model's chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from turnout.server.api.body import Body, describe_others
from turnout.server.api.tools import ToolCall

OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message")
NOT_VARIABLES = ("chat_template", "tokenize", "add_special_tokens")  # of other engines' template functions


def _text(value: Any) -> Any:
    """The content of a message as one text, from a text or a list of text parts."""
    if isinstance(value, list):
        return "".join(_part_text(i, part) for i, part in enumerate(value))
    if value is None or isinstance(value, str):
        return value
    raise ValueError('must be a text or a list of parts like {"type": "text", "text": "..."}')


def _part_text(index: int, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError(f'part {index} must be an object like {{"type": "text", "text": "..."}}')
    if part["type"] != "text":
        raise ValueError(
            f"part {index} is of type {part['type'][:40]!r}, but this model takes text only; send it as "
            '{"type": "text", "text": "..."} or leave it out'
        )
    if not isinstance(part.get("text"), str):
        raise ValueError(f"part {index}: its text must be a string")
    if unknown := part.keys() - {"type", "text", "cache_control"}:
        raise ValueError(f"part {index}: unknown field {min(unknown)!r}; a text part has type and text")
    return part["text"]


def only_text(part: Any) -> Any:
    """Checks the parts that the newer protocols have texts in, before their other fields."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and not kind.endswith("text"):
        raise ValueError(f"this model takes text only, and no part of type {kind[:40]!r}; leave it out")
    return part


CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}, "cache_control": {}},
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        },
        {"type": "null"},
    ],
}


# Only an assistant may say nothing, or call tools; only a tool answers a call.
BY_ROLE = {
    "if": {"properties": {"role": {"const": "assistant"}}},
    "then": {"properties": {"tool_call_id": {"type": "null"}}},
    "else": {
        "required": ["content"],
        "properties": {"content": {"type": ["string", "array"]}, "tool_calls": {"enum": [None, []]}},
        "if": {"properties": {"role": {"const": "tool"}}},
        "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string"}}},
        "else": {"properties": {"tool_call_id": {"type": "null"}}},
    },
}


def _describe_message(schema: dict[str, Any]) -> None:
    describe_others(schema)
    schema |= BY_ROLE


class Message(Body):
    model_config = ConfigDict(json_schema_extra=_describe_message)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, BeforeValidator(_text), Field(validate_default=True), WithJsonSchema(CONTENT)
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name for the same
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _only_assistants_call_and_only_tools_answer(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: only an assistant calls tools, but the role is {self.role!r}")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id: required of a tool's message; it is the id of the call")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"tool_call_id: only a tool's message has it, but the role is {self.role!r}")
        return self

    @field_validator("content")
    @classmethod
    def _only_an_assistant_may_say_nothing(cls, content: str | None, info: ValidationInfo) -> str:
        if content is None and info.data.get("role", "assistant") != "assistant":
            raise ValueError("required; only an assistant's may be null")
        return content or ""

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: plain text, arguments of calls as objects, and `developer` under its
        older name."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.name is not None:
            message["name"] = self.name
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All texts of the system and of developers as one message, the first: many chat templates refuse further
    ones, or later ones, which agents send."""
    texts = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def check_calls(messages: list[Message]) -> list[Message]:
    """Raises ValueError unless each tool's message answers a call of the assistant's last that made any."""
    calls: set[str] = set()
    for i, message in enumerate(messages):
        if message.tool_calls:
            calls = {call.id for call in message.tool_calls}
            if len(calls) < len(message.tool_calls):
                raise ValueError(f"{i}.tool_calls: two calls have the same id; ids must differ")
        if message.role == "tool" and message.tool_call_id not in calls:
            before = ", ".join(sorted(calls)) or "there is none"
            raise ValueError(
                f"{i}.tool_call_id: {message.tool_call_id!r} is not the id of a call in the assistant's last "
                f"message with tool_calls before it ({before})"
            )
    return messages


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), AfterValidator(check_calls)]


def _template_kwargs(given: dict[str, Any] | None) -> dict[str, Any] | None:
    for name in given or {}:
        if name in OWN_FIELDS:
            raise ValueError(f"{name!r} is no variable to choose; it is a field of the request itself")
        if name in NOT_VARIABLES:
            raise ValueError(f"{name!r} is not a variable of chat templates, and cannot be changed here")
    return given


class TemplateFields(Body):
    """How a conversation becomes a prompt."""

    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_template_kwargs)] = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _one_ending_and_one_effort(self) -> TemplateFields:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        elsewhere = (self.chat_template_kwargs or {}).get("reasoning_effort")
        if None not in (elsewhere, self.reasoning_effort) and elsewhere != self.reasoning_effort:
            raise ValueError("reasoning_effort and chat_template_kwargs.reasoning_effort differ; give one")
        return self

    def template_options(self) -> dict[str, Any]:
        """Arguments of `Tokenizer.encode_chat` apart from the messages.

        An effort also switches thinking on or off, under the two names that templates have for it.
        """
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            switches = {"enable_thinking": thinks, "thinking": thinks}
            variables = switches | variables | {"reasoning_effort": self.reasoning_effort}
        return variables | {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": bool(self.continue_final_message),
            "add_special_tokens": bool(self.add_special_tokens),
        }
