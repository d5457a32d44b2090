"""Anthropic's requests of /v1/messages, and the chat that each asks for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from turnout.server.api.body import Body, QueueFields
from turnout.server.api.chat import only_text, system_first
from turnout.server.api.sizes import MAX_STOP_STRINGS
from turnout.server.api.tools import Name, Parameters


class Block(BaseModel):
    """Fields that concern only Anthropic's own service (`cache_control`, `citations`) are passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Block):
    type: Literal["redacted_thinking"]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]


Texts = str | Annotated[list[Annotated[TextBlock, BeforeValidator(only_text)]], Field(fail_fast=True)]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock, Field(discriminator="type")
]


class UserMessage(Block):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(fail_fast=True)]

    def for_chat(self) -> list[dict[str, Any]]:
        """Results of tools are messages of their own, before what else the user says."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        messages: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
            for block in results
        ]
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        return [*messages, {"role": "user", "content": "".join(texts)}] if texts or not results else messages


class AssistantMessage(Block):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(fail_fast=True)]

    def for_chat(self) -> list[dict[str, Any]]:
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(block.text for block in self.content if isinstance(block, TextBlock)),
        }
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        calls = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": json.dumps(block.input)},
            }
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        return [message]


class SystemMessage(Block):
    role: Literal["system"]
    content: Texts

    def for_chat(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": _text(self.content)}]


InputMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(Block):
    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": function}


class ToolChoice(Block):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _name_where_it_is_used(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('name: goes with type "tool", and only with that')
        return self

    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class Thinking(Block):
    """`budget_tokens` bounds nothing: what stops a thought here is max_tokens."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class JsonFormat(Block):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    def for_chat(self) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema_}}


class OutputConfig(Block):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountBody(Body):
    """What makes the prompt, and what the answer may be.

    context_management: edits of long contexts, which are not made: the prompt is what was sent
    """

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def for_chat(self) -> dict[str, Any]:
        """The fields of the chat request. Without `thinking` a model that can think does not. An assistant's
        message at the end is the beginning of the answer."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        messages = [*system, *(part for message in self.messages for part in message.for_chat())]
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": system_first(messages),
            "continue_final_message": messages[-1]["role"] == "assistant"
            and "tool_calls" not in messages[-1],
            "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks}
            | (self.chat_template_kwargs or {}),
        }
        if self.tools:
            fields["tools"] = [tool.for_chat() for tool in self.tools]
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.for_chat()
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                fields["response_format"] = self.output_config.format.for_chat()
        return fields


class MessagesBody(CountBody, QueueFields):
    """max_tokens: of the answer at most, however much of the context is left for it"""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOP_STRINGS)] | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _room_for_an_answer(self) -> MessagesBody:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            raise ValueError(
                "thinking.budget_tokens: must be less than max_tokens, which hold the answer, too"
            )
        return self

    def for_chat(self) -> dict[str, Any]:
        return super().for_chat() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or [],
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
        }


def _text(content: Texts | None) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content or ())
