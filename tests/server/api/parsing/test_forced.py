"""Calls that a request forces, and calls of strict tools among text: what chat templates write is allowed,
and what breaks the schema is not."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from tests.server.api.parsing.formats import render
from turnout.engine import grammar
from turnout.errors import UserError
from turnout.server.api.parsing.registry import CALL_PARSERS
from turnout.server.api.parsing.registry import FAMILIES as FAMILIES_KNOWN
from turnout.server.api.protocol import ChatBody, validated
from turnout.server.api.structured import TOOLS
from turnout.server.api.tools import restricted_calls

TAGGED = ["qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "deepseek_v4"]
SIZE = {"type": "object", "properties": {"w": {"type": "number"}}, "additionalProperties": False}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "color": {"type": "string", "enum": ["red", "deep blue"]},
        "count": {"type": "integer"},
        "size": {"$ref": "#/$defs/size"},
        "maybe": {"type": ["string", "null"]},
    },
    "required": ["text", "color"],
    "$defs": {"size": SIZE},
}


def forced(family: str, schema: dict[str, Any] = SCHEMA, **fields: Any) -> str:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in ("paint", "other")
    ]
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": tools,
        "tool_choice": "required",
    } | fields
    made = restricted_calls(validated(ChatBody, body), CALL_PARSERS[family], {})
    return grammar.grammar(made[TOOLS]())


def allows(text: str, rules: str) -> bool:
    matcher = LLMatcher(grammar._bytes_only(), rules)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def written(family: str, *calls: dict[str, Any]) -> str:
    made = [{"name": "paint", "arguments": arguments} for arguments in calls]
    return render(family, content="", reasoning="", calls=made).strip()


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "a < b <i> & c\nd", "color": "deep blue"},
        {"text": "", "color": "red", "count": -3, "size": {"w": 1.5}, "maybe": None},
    ],
)
def test_what_the_chat_template_writes_is_allowed(family: str, arguments: dict[str, Any]):
    text = written(family, arguments)
    text = text.rpartition("</think>")[2].strip()
    assert allows(text, forced(family)), text


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    "arguments",
    [
        {"color": "red"},
        {"text": "a", "color": "green"},
        {"text": "a", "color": "red", "count": 1.5},
        {"text": "a", "color": "red", "size": {"h": 1}},
        {"text": "a", "color": "red", "further": 1},
    ],
)
def test_what_breaks_the_schema_is_not(family: str, arguments: dict[str, Any]):
    text = written(family, arguments).rpartition("</think>")[2].strip()
    assert not allows(text, forced(family)), text


@pytest.mark.parametrize("family", TAGGED)
def test_a_named_tool_is_the_only_one(family: str):
    text = written(family, {"text": "a", "color": "red"}).rpartition("</think>")[2].strip()
    for name in ("paint", "other"):
        rules = forced(family, tool_choice={"type": "function", "function": {"name": name}})
        assert allows(text, rules) is (name == "paint")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern: cannot be followed in 'a'"),
        ({"properties": {"a b": {"type": "string"}}}, "'a b' cannot be the name"),
        ({"properties": {}, "required": ["c"]}, "required: 'c' is not one of"),
    ],
)
def test_what_tags_cannot_hold_is_said(schema: dict[str, Any], reason: str):
    with pytest.raises(UserError, match=f"tool 'paint': .*{reason}"):
        forced("glm45", schema)


def test_of_channels_a_call_is_forced_after_any_thoughts():
    rules = forced("gpt_oss")
    call = {"name": "paint", "arguments": {"text": "a", "color": "red", "size": {"w": 1}}}
    for thought in ("", "Red <| it is.\n"):
        written = render("gpt_oss", reasoning=thought, content="", calls=[call])
        assert allows(written, rules), written
        assert not allows(written.replace("red", "green"), rules)
        assert not allows(written.replace("functions.paint", "functions.write"), rules)
    assert not allows(render("gpt_oss", reasoning="", content="Red.", calls=[]), rules)


FAMILIES = sorted({family.names[0] for family in FAMILIES_KNOWN})


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_strict_tools_follow_their_schemas_among_text(family: str):
    strict = {"name": "paint", "parameters": SCHEMA, "strict": True}
    tools = [{"type": "function", "function": f} for f in (strict, {"name": "other", "parameters": SCHEMA})]
    rules = forced(family, tools=tools, tool_choice="auto")
    good, bad = {"text": "a < b", "color": "red"}, {"text": "a", "color": "green"}

    def answer(content: str, *calls: tuple[str, dict[str, Any]]) -> str:
        made = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return render(family, reasoning="", content=content, calls=made).strip()

    assert allows(answer("Just <text>, {no} call."), rules)
    assert allows(answer("Look:", ("paint", good)), rules)
    assert allows(answer("", ("other", bad)), rules)  # which is not strict
    assert not allows(answer("Look:", ("paint", bad)), rules)
    assert not allows(answer("", ("unknown", good)), rules)
    if family != "gpt_oss":  # a call ends its answer
        assert allows(answer("Look:", ("paint", good), ("other", bad), ("paint", good)), rules)
        assert not allows(answer("Look:", ("other", good), ("paint", bad)), rules)
        assert allows(answer("Look:", ("paint", good)) + " Done.", rules)


def test_no_grammar_where_no_tool_is_strict():
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS_OF_NO_STRICTNESS}
    assert not restricted_calls(validated(ChatBody, body), CALL_PARSERS["qwen3"], {})


TOOLS_OF_NO_STRICTNESS = [{"type": "function", "function": {"name": "paint", "strict": False}}]
