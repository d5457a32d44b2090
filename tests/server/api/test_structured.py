"""Structured output through the API: every spelling, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from turnout.engine.grammar import Reasoning
from turnout.server.api.parsing.registry import Parsers
from turnout.server.api.structured import StructuredFields

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
IS_ANIMAL = r'\{\s*"kind"\s*:\s*"(cat|dog)"\s*,\s*"legs"\s*:\s*[0-9]\s*\}'
NO_THOUGHTS: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
COMPACT = IS_ANIMAL.replace(r"\s*", "")
TAGS = 'root ::= "<" ("a" | "b") ">"'
SPELLINGS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, IS_ANIMAL),
    ({"structured_outputs": {"json": SCHEMA}}, IS_ANIMAL),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, COMPACT),
    ({"guided_json": SCHEMA}, IS_ANIMAL),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]"}, IS_ANIMAL.replace(r"\s*", " ?")),
    ({"json_schema": json.dumps(SCHEMA)}, IS_ANIMAL),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"regex": "[ab]{3}"}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"grammar": TAGS}}, "<[ab]>"),
    ({"guided_grammar": TAGS}, "<[ab]>"),
    ({"ebnf": TAGS}, "<[ab]>"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "pattern"), SPELLINGS, ids=[str(i) for i in range(len(SPELLINGS))])
def test_every_spelling_in_both_routes(http: httpx.Client, fields: dict[str, Any], pattern: str):
    body = {"max_tokens": 300, "n": 3, "seed": 1, **fields}
    messages = [{"role": "user", "content": "go"}]
    chat = http.post("/v1/chat/completions", json=body | NO_THOUGHTS | {"messages": messages})
    plain = http.post("/v1/completions", json=body | {"prompt": "go"})
    texts = [choice["message"]["content"] for choice in chat.json()["choices"]]
    texts += [choice["text"] for choice in plain.json()["choices"]]
    assert len(texts) == 6
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert {c["finish_reason"] for answer in (chat, plain) for c in answer.json()["choices"]} == {"stop"}


def test_all_spellings_are_tried():
    used = {name for fields, _ in SPELLINGS for name in fields}
    assert used == set(StructuredFields.model_fields)


def test_openais_client_parses_a_stream_into_its_model(client: openai.OpenAI):
    class Animal(BaseModel):
        kind: str
        legs: int

    schema = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    messages: Any = [{"role": "user", "content": "which?"}]
    parts = client.chat.completions.create(
        model="tiny",
        messages=messages,
        response_format=schema,
        stream=True,
        max_tokens=300,
        extra_body=NO_THOUGHTS,  # type: ignore
    )
    Animal.model_validate_json("".join(part.choices[0].delta.content or "" for part in parts))
    whole = client.chat.completions.create(
        model="tiny",
        messages=messages,
        response_format={"type": "json_object"},
        max_tokens=30,
        temperature=0,
        extra_body=NO_THOUGHTS,
    )
    assert (whole.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        (
            {"guided_json": {"type": "object", "properties": {"a": {"not": {}}}}},
            "guided_json",
            "keyword 'not'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"if": {}}}}},
            "response_format",
            "keyword 'if'",
        ),
        ({"guided_json": '{"type":'}, "guided_json", "not valid JSON"),
        ({"json_schema": "[" * 5000}, "json_schema", "recursion limit"),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"ebnf": "root ::= none"}, "ebnf", "Rule 'none' not found"),
        ({"structured_outputs": {"json": {"type": "nul"}}}, "structured_outputs", "Invalid type: nul"),
        ({"regex": "a", "ebnf": TAGS}, None, "regex and ebnf both say what the answer must be"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "leave one of the two out"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    http: httpx.Client, fields: dict[str, Any], param: str | None, reason: str
):
    answer = http.post("/v1/completions", json={"prompt": "go", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert reason in error["message"]


def test_a_schema_as_deep_as_json_allows_is_refused(http: httpx.Client):
    deep = '{"type": "array", "items": ' * 90 + "{}" + "}" * 90
    answer = http.post("/v1/completions", content='{"prompt": "a", "guided_json": ' + deep + "}")
    assert answer.status_code == 400
    assert "levels deep" in answer.json()["error"]["message"]
    deeper = '{"prompt": "a", "guided_json": ' + '{"items": ' * 9000 + "{}" + "}" * 9000 + "}"
    answer = http.post("/v1/completions", content=deeper)
    assert answer.status_code == 400
    assert "recursion limit" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>a</think>b<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
    ],
)
def test_an_answer_waits_for_thoughts_where_they_are_parsed(prompt: str, begun: bool | None):
    special = {"</think>": 7}
    expected = (
        None if begun is None else Reasoning(begin="<think>", end="</think>", begun=begun, special=special)
    )
    assert Parsers.chosen("none", "qwen3").thoughts(prompt, special) == expected
    assert Parsers.chosen("none", "none").thoughts(prompt, special) is None
