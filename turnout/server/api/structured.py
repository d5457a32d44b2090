"""What requests say about the form of an answer, in the spellings of OpenAI, vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import from_json

from turnout.engine.grammar import (
    ANY_OBJECT,
    WHITESPACE,
    Reasoning,
    check,
    grammar,
    json_value,
    lark,
    literal,
    matching,
    one_of,
)
from turnout.errors import UserError
from turnout.server.api.body import Body, Off
from turnout.server.api.errors import invalid

TOOLS = "tools"  # the field whose expression is ours; what makes it also checks it
MAX_CHOICES = 1024  # texts to choose from

JsonSchema = dict[str, Any] | bool
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
Restrictions = dict[str, Callable[[], str]]  # by field, what makes the expression (engine/grammar.py)


class NamedSchema(Body):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None  # answers follow the schema either way


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_is_used(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError('json_schema: goes with type "json_schema", and only with that')
        return self

    def answer(self) -> str:
        schema = self.json_schema.schema_ if self.json_schema else None
        return json_value(ANY_OBJECT if schema is None else schema)


class StructuredOutputs(Body):
    """vLLM's."""

    json_: Annotated[JsonSchema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # there is one library, and no other to fall back to
    disable_additional_properties: Off | None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _one_style_of_whitespace(self) -> StructuredOutputs:
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError("disable_any_whitespace and whitespace_pattern exclude each other; give one")
        return self

    def restrictions(self) -> Restrictions:
        whitespace = None if self.disable_any_whitespace else self.whitespace_pattern or WHITESPACE
        json = ANY_OBJECT if self.json_object and self.json_ is None else self.json_
        return _given(
            ("json", partial(_json, whitespace=whitespace), json),
            ("regex", matching, self.regex),
            ("choice", _choice, self.choice),
            ("grammar", lark, self.grammar),
        )


class StructuredFields(Body):
    """Of completions and of chat. At most one of them may restrict the answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: JsonSchema | str | None = None  # this one and the next two are SGLang's
    regex: str | None = None
    ebnf: str | None = None

    @model_validator(mode="after")
    def _one_restriction(self) -> StructuredFields:
        if len(fields := list(self.restrictions())) > 1:
            raise ValueError(
                f"{fields[0]} and {fields[1]} both say what the answer must be; give one of them"
            )
        return self

    def restrictions(self) -> Restrictions:
        """None or one."""
        whitespace = self.guided_whitespace_pattern or WHITESPACE
        found = _given(
            ("guided_json", partial(_json, whitespace=whitespace), self.guided_json),
            ("guided_regex", matching, self.guided_regex),
            ("guided_choice", _choice, self.guided_choice),
            ("guided_grammar", lark, self.guided_grammar),
            ("json_schema", _json, self.json_schema),
            ("regex", matching, self.regex),
            ("ebnf", lark, self.ebnf),
        )
        if self.response_format is not None and self.response_format.type != "text":
            found["response_format"] = self.response_format.answer
        if self.structured_outputs is not None:
            parts = self.structured_outputs.restrictions()
            found |= {f"structured_outputs.{name}": make for name, make in parts.items()}
        return found


def compiled(restrictions: Restrictions, after: Reasoning | None = None) -> str:
    """The grammar of answers, after what a model may think before; "" if any text will do.

    Takes milliseconds, and tenths of a second for what is made for that: call it in a thread.
    Raises ApiError 400 naming the field, and of a schema the keyword, that cannot be followed.
    """
    for field, make in restrictions.items():
        try:
            answer = make()
            if field != TOOLS:
                check(grammar(answer))
        except UserError as error:
            raise invalid(f"{field}: {error}", field.split(".")[0]) from None
        return grammar(answer, after=after)
    return ""


def _given(*fields: tuple[str, Callable[[Any], str], Any]) -> Restrictions:
    return {name: partial(make, value) for name, make, value in fields if value is not None}


def _json(schema: JsonSchema | str, whitespace: str | None = WHITESPACE) -> str:
    if isinstance(schema, str):
        try:
            schema = from_json(schema)
        except ValueError as error:
            raise UserError(f"not valid JSON: {error}") from None
    return json_value(schema, whitespace=whitespace)


def _choice(texts: Sequence[str]) -> str:
    return one_of(map(literal, texts))
