"""Tools that a request offers, and which of them the answer may call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from turnout.engine.grammar import (
    among_text,
    check,
    grammar,
    in_channels,
    literal,
    one_of,
    repeated,
    sequence,
    tagged_arguments,
    tool_calls,
    until,
)
from turnout.server.api.body import Body
from turnout.server.api.errors import invalid
from turnout.server.api.parsing import harmony
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


def _no_free_form(kind: Any) -> Any:
    if kind == "custom":
        raise ValueError(
            "tools of free-form text (custom) are not served; offer a function with one parameter, a text"
        )
    return kind


class Tool(Body):
    type: Annotated[Literal["function"], BeforeValidator(_no_free_form)]
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


class AllowedFunction(Body):
    type: Literal["function"]
    function: ChosenFunction


class AllowedList(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedFunction], Field(min_length=1, fail_fast=True)]


class AllowedTools(Body):
    """The model is told of all tools, so that prefixes stay the same, and may call only these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


Choice = Annotated[ToolChoice | AllowedTools, Field(discriminator="type")]


class ToolFields(Body):
    """What a request says about tools."""

    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _names_differ_and_the_chosen_is_there(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"tools: two have the name {twice!r}; names must differ")
        for name in self.chosen or ():
            if name not in names:
                known = ", ".join(names) or "there are none"
                raise ValueError(f"tool_choice: {name!r} is not the name of a tool ({known})")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required, but there are no tools")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def chosen(self) -> list[str] | None:
        """Names of the only tools that may be called, if the choice names any."""
        match self.tool_choice:
            case ToolChoice(function=function):
                return [function.name]
            case AllowedTools(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools]
        return None

    @property
    def must_call(self) -> bool:
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice not in ("auto", "none", None)


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str

    def for_template(self) -> dict[str, Any]:
        """Arguments that are not JSON, which streams hand out as the model wrote them, stay as they are."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except ValueError:
            arguments = self.arguments
        return {"name": self.name, "arguments": arguments}

    @model_validator(mode="after")
    def _arguments_are_no_other_json_than_an_object(self) -> CalledFunction:
        try:
            value = json.loads(self.arguments or "{}")
        except ValueError:
            return self
        except RecursionError:
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


def restricted_calls(fields: ToolFields, family: Family | None, special: Mapping[str, int]) -> Restrictions:
    """The calls that `tool_choice` wants or, where the model may choose, those of strict tools or of allowed
    ones among other text, as the family writes them; none if nothing of this is asked for.

    special: tokens (to their ids) in the family's marks. Raises ApiError 400 where something else restricts
    the answer as well.
    """
    forced, chosen = fields.must_call, fields.chosen
    also = list(fields.restrictions()) if isinstance(fields, StructuredFields) else []
    if forced and also:
        raise invalid(
            f"tool_choice and {also[0]} both say what the answer must be; give one of them", also[0]
        )
    strict = any(tool.function.strict for tool in fields.offered)
    if family is None or also or not (forced or chosen or strict):
        return {}
    tools = [tool for tool in fields.offered if chosen is None or tool.function.name in chosen]
    parallel = not isinstance(fields.tool_choice, ToolChoice) and fields.parallel_tool_calls is not False
    write = partial(_calls, family, tools, forced=forced, parallel=parallel)

    def make() -> str:
        check(grammar(write({})))  # its vocabulary has bytes only: marks are spelled
        return write(special)

    return {TOOLS: make}


def _calls(
    family: Family, tools: Sequence[Tool], special: Mapping[str, int], *, forced: bool, parallel: bool
) -> str:
    """An expression for calls of `tools`, and nothing else if `forced`. Raises UserError."""
    written = family.calls
    if written is None:
        made = tool_calls(_schemas(tools, forced), harmony.WRITTEN, special=special)
        return in_channels(made, special, only_calls=forced)
    begin, end = written.section or (written.begin, "")
    first = "" if written.section or forced else written.begin  # which the text before a call ends with
    call, rules, free = written.written.removeprefix(first), "", list[Tool]()
    arguments = None
    if written.written_argument is not None:
        arguments = partial(
            tagged_arguments, argument=written.written_argument, is_text=is_text, special=special
        )
        free = [] if forced else [tool for tool in tools if not tool.function.strict]
    each = []
    if bound := [tool for tool in tools if tool not in free]:
        schemas = _schemas(bound, forced)
        each.append(tool_calls(schemas, call, special=special, arguments=arguments))
    if free:
        anything, rules = until("other_call", written.end, special)
        heads = [call.format(name=tool.function.name, arguments="\0").split("\0")[0] for tool in free]
        each.append(sequence(one_of(literal(head, special) for head in heads), anything))
    calls = one_of(each)
    if parallel and (forced or written.section):
        calls = repeated(calls, between=r"/\n?/")
    if written.section is not None:
        space = [r"/\n?/"] if arguments else []
        calls = sequence(*space, calls, *space, literal(end, special))
        calls = sequence(literal(begin, special), calls) if forced else calls
    return calls if forced else among_text(calls, begin, special) + rules


def _schemas(tools: Sequence[Tool], forced: bool) -> list[tuple[str, Any]]:
    return [
        (tool.function.name, tool.schema_of_arguments if forced or tool.function.strict else None)
        for tool in tools
    ]
