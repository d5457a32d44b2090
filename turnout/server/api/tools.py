"""Tools that a request offers, and which of them the answer may call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from turnout.engine.grammar import literal, sequence, tagged_arguments, tool_calls
from turnout.server.api.body import Body
from turnout.server.api.errors import invalid
from turnout.server.api.parsing.calls import is_text
from turnout.server.api.parsing.family import Family
from turnout.server.api.structured import TOOLS, Restrictions, StructuredFields

NAME = "^[A-Za-z0-9_.-]{1,128}$"  # no character that the formats of calls use
Name = Annotated[str, Field(pattern=NAME)]


def _parameters(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    if schema.get("type", "object") != "object":
        raise ValueError(f'must be a JSON schema of type "object", not {schema["type"]!r}')
    if not isinstance(schema.get("properties", {}), dict):
        raise ValueError("properties must be an object")
    return schema


_SCHEMA = {
    "anyOf": [
        {"type": "object", "properties": {"type": {"const": "object"}, "properties": {"type": "object"}}},
        {"type": "null"},
    ]
}
Parameters = Annotated[dict[str, Any] | None, AfterValidator(_parameters), WithJsonSchema(_SCHEMA)]


class Function(Body):
    name: Name
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        function: dict[str, Any] = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.schema_of_arguments,
        }
        return {"type": "function", "function": function}

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.function.parameters or {"type": "object", "properties": {}}


class ChosenFunction(Body):
    name: Name


class ToolChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class ToolFields(Body):
    """What a request says about tools."""

    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _names_differ_and_the_chosen_is_there(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"tools: two have the name {twice!r}; names must differ")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            known = ", ".join(names) or "there are none"
            raise ValueError(
                f"tool_choice: {self.tool_choice.function.name!r} is not the name of a tool ({known})"
            )
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required, but there are no tools")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str

    def for_template(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": json.loads(self.arguments or "{}")}

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> CalledFunction:
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"arguments of {self.name!r}: must be the text of a JSON object")
        return self


class ToolCall(Body):
    """A call that an earlier answer made."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    index: int | None = None  # of a streamed call, which clients keep
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": self.function.for_template()}


def forced_calls(fields: ToolFields, family: Family | None, special: Mapping[str, int]) -> Restrictions:
    """The calls that `tool_choice` wants, as the family writes them; none if the model may choose.

    special: tokens (to their ids) in the family's marks. Raises ApiError 400 where they cannot be forced.
    """
    if fields.tool_choice in ("auto", "none", None):
        return {}
    written = family.calls if family is not None else None
    if written is None or written.written is None:
        raise invalid(
            "tool_choice: this model writes calls in channels, in which they cannot be forced; "
            "send auto, or none",
            "tool_choice",
        )
    if isinstance(fields, StructuredFields) and (also := list(fields.restrictions())):
        raise invalid(
            f"tool_choice and {also[0]} both say what the answer must be; give one of them", also[0]
        )
    chosen = fields.tool_choice.function.name if isinstance(fields.tool_choice, ToolChoice) else None
    tools = [
        (tool.function.name, tool.schema_of_arguments)
        for tool in fields.offered
        if chosen in (None, tool.function.name)
    ]
    parallel = chosen is None and fields.parallel_tool_calls is not False

    def make() -> str:
        tagged = None
        if written.written_argument is not None:
            tagged = partial(
                tagged_arguments, argument=written.written_argument, is_text=is_text, special=special
            )
        calls = tool_calls(tools, written.written or "", parallel=parallel, special=special, arguments=tagged)
        if written.section is None:
            return calls
        before, after = (literal(mark, special) for mark in written.section)
        return (
            sequence(before, "/\\n?/", calls, "/\\n?/", after) if tagged else sequence(before, calls, after)
        )

    return {TOOLS: make}
