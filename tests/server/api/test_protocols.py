"""/v1/responses and /v1/messages: the official clients against a real server of a model that calls tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
QUESTION = "What is 19 + 23"
THOUGHT, TEXT, ARGUMENTS = "The user wants a sum.", "I will add.", {"a": 19, "b": 23}
RESPONSE: dict[str, Any] = {
    "model": "scripted",
    "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
}
MESSAGE: dict[str, Any] = {
    "model": "scripted",
    "max_tokens": 256,
    "tools": [{"name": "add", "description": "A sum.", "input_schema": PARAMETERS}],
    "thinking": {"type": "enabled", "budget_tokens": 128},
}
ASK = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def gpt(scripted: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def claude(scripted: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=scripted, api_key="unused", max_retries=0, timeout=60)


@pytest.fixture
def web(scripted: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted, timeout=60) as web:
        yield web


def add(a: int, b: int) -> int:
    return a + b


def test_responses_in_a_loop_that_runs_its_tool(gpt: openai.OpenAI):
    conversation: list[Any] = [{"role": "user", "content": QUESTION}]
    kinds = []
    while True:
        answer = gpt.responses.create(**RESPONSE, input=conversation)
        assert answer.status == "completed"
        kinds.append([item.type for item in answer.output])
        conversation += [item.model_dump() for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            result = {"add": add}[call.name](**json.loads(call.arguments))
            conversation.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": str(result)}
            )
    assert kinds == [["reasoning", "message", "function_call"], ["message"]]
    assert answer.output_text == "The sum is 42."
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_streamed_response_adds_up_to_the_whole(gpt: openai.OpenAI):
    with gpt.responses.stream(**RESPONSE, input=QUESTION) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = gpt.responses.create(**RESPONSE, input=QUESTION)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    deltas = {
        kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    }
    assert deltas["reasoning_text"] == THOUGHT
    assert deltas["output_text"] == TEXT == whole.output_text
    assert json.loads(deltas["function_call_arguments"]) == ARGUMENTS
    for streamed, one in zip(final.output, whole.output, strict=True):
        assert streamed.type == one.type
    assert final.output[2].arguments == whole.output[2].arguments
    assert (
        final.usage.output_tokens_details.reasoning_tokens
        == whole.usage.output_tokens_details.reasoning_tokens
        > 0
    )


def test_a_response_that_is_cut_off(gpt: openai.OpenAI):
    answer = gpt.responses.create(model="scripted", input="Hi", max_output_tokens=1, instructions="Be nice.")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text == "Hello"


def test_messages_in_a_loop_that_runs_its_tool(claude: anthropic.Anthropic):
    conversation: list[Any] = list(ASK)
    while True:
        answer = claude.messages.create(
            **MESSAGE, messages=conversation, system=[{"type": "text", "text": "Add."}]
        )
        conversation.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))}
            for block in answer.content
            if block.type == "tool_use"
        ]
        conversation.append({"role": "user", "content": results})
    assert [block.type for block in conversation[1]["content"]] == ["thinking", "text", "tool_use"]
    assert conversation[1]["content"][0].thinking == THOUGHT
    assert [block.text for block in answer.content] == ["The sum is 42."]
    assert answer.stop_reason == "end_turn"


def test_a_streamed_message_adds_up_to_the_whole(claude: anthropic.Anthropic):
    whole = claude.messages.create(**MESSAGE, messages=ASK)
    with claude.messages.stream(**MESSAGE, messages=ASK) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_message()
    assert types[0] == "message_start"
    assert types[-1] == "message_stop"
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[0].thinking == whole.content[0].thinking == THOUGHT
    assert final.content[1].text == whole.content[1].text == TEXT
    assert final.content[2].input == whole.content[2].input == ARGUMENTS
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens > 0


def test_how_messages_end(claude: anthropic.Anthropic):
    fields: dict[str, Any] = {"model": "scripted", "messages": ASK}
    answer = claude.messages.create(**fields, max_tokens=256, stop_sequences=["how"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "how")
    assert answer.content[0].text == "Hello there, "
    assert claude.messages.create(**fields, max_tokens=1).stop_reason == "max_tokens"
    silent = claude.messages.create(**MESSAGE | {"thinking": {"type": "disabled"}}, messages=ASK)
    assert [block.type for block in silent.content] == ["text", "tool_use"]


def test_tokens_are_counted_as_the_model_sees_them(claude: anthropic.Anthropic):
    fields = {name: value for name, value in MESSAGE.items() if name != "max_tokens"}
    count = claude.messages.count_tokens(**fields, messages=ASK).input_tokens
    usage = claude.messages.create(**MESSAGE, messages=ASK).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


REFUSED_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: "),
    ({"tools": [{"input_schema": PARAMETERS}]}, "tools.0.name: required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 256}}, "must be less than max_tokens"),
    ({"tool_choice": {"type": "tool"}}, 'name: goes with type "tool"'),
    ({"max_token": 3}, "max_token: unknown field; did you mean max_tokens?"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "this model takes text only",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]}
            ]
        },
        "'t' is not the id of a call",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED_MESSAGES)
def test_messages_are_refused_in_their_own_shape(web: httpx.Client, fields: dict[str, Any], message: str):
    reply = web.post("/v1/messages", json=MESSAGE | {"messages": ASK} | fields)
    assert reply.status_code == 400
    assert reply.json().keys() == {"type", "error"}
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert message in reply.json()["error"]["message"]


REFUSED_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id: "),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: "),
    ({"tools": [{"type": "function"}]}, "tools.0.name: required"),
    ({"input": []}, "input"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]},
        "'c' is not the id of a call",
    ),
    ({"background": True}, "background: "),
    ({"max_output_tokens": 0}, "max_output_tokens: "),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED_RESPONSES)
def test_responses_are_refused_by_name(web: httpx.Client, fields: dict[str, Any], message: str):
    reply = web.post("/v1/responses", json=RESPONSE | {"input": QUESTION} | fields)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_errors_that_the_clients_know(claude: anthropic.Anthropic, gpt: openai.OpenAI):
    with pytest.raises(anthropic.NotFoundError, match="serves 'scripted'"):
        claude.messages.create(**MESSAGE | {"model": "other"}, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="the context holds"):
        claude.messages.create(**MESSAGE | {"tools": [], "max_tokens": 5000}, messages=ASK[:1])
    with pytest.raises(openai.NotFoundError):
        gpt.responses.create(model="other", input="Hi")
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        gpt.embeddings.create(model="scripted", input="a")
