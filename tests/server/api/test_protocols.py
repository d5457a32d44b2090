"""/v1/responses and /v1/messages: the official clients against a real server of a model that calls tools."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import httpx
import openai
import pydantic
import pytest
from starlette.testclient import TestClient

from turnout.config import ServerConfig
from turnout.server.api.app import create_app
from turnout.server.api.control import Control
from turnout.server.api.service import Service
from turnout.server.supervise.engine import EngineSupervisor

if TYPE_CHECKING:
    import anthropic

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
    import anthropic  # which takes a second: not for every worker that collects this file

    return anthropic.Anthropic(base_url=scripted, api_key="unused", max_retries=0, timeout=60)


@pytest.fixture
def web(scripted: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted, timeout=60) as web:
        yield web


def add(a: int, b: int) -> int:
    return a + b


def runs(types: Iterable[str]) -> list[str]:
    """Without repetitions of neighbours."""
    return [kind for kind, _ in itertools.groupby(types)]


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
    assert runs(event.type.removeprefix("response.") for event in events) == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    deltas = {
        kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    }
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert arguments == ['{"a": 19, ', '"b": 23', "}"]
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
    assert answer.output[-1].status == "incomplete"
    with gpt.responses.stream(model="scripted", input="Hi", max_output_tokens=1) as stream:  # type: ignore
        *_, done, last = stream
    assert (done.type, done.item.status) == ("response.output_item.done", "incomplete")
    assert (last.type, last.response.incomplete_details.reason) == (
        "response.incomplete",
        "max_output_tokens",
    )
    assert last.response.output == [done.item]


def test_a_streamed_call_of_a_response_that_is_cut_off_is_incomplete(gpt: openai.OpenAI):
    events = list(gpt.responses.create(**RESPONSE, input=QUESTION, max_output_tokens=8, stream=True))
    assert not [event for event in events if event.type == "response.function_call_arguments.done"]
    call = events[-1].response.output[-1]
    assert (call.type, call.status, call.arguments) == ("function_call", "incomplete", '{"a": 19, ')
    assert events[-1].response.status == "incomplete"


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
    start, *_ = events = list(claude.messages.create(**MESSAGE, messages=ASK, stream=True))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert runs(event.type for event in events) == [
        "message_start",
        *block * 3,
        "message_delta",
        "message_stop",
    ]
    assert (start.message.content, start.message.stop_reason) == ([], None)
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    arguments = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert arguments == ['{"a": 19, ', '"b": 23', "}"]
    with claude.messages.stream(**MESSAGE, messages=ASK) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[0].thinking == whole.content[0].thinking == THOUGHT
    assert final.content[1].text == whole.content[1].text == TEXT
    assert final.content[2].input == whole.content[2].input == ARGUMENTS
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens > 0
    read = [u.input_tokens + (u.cache_read_input_tokens or 0) for u in (final.usage, whole.usage)]
    assert read[0] == read[1] == start.message.usage.input_tokens > 0


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


def test_what_claude_code_sends(claude: anthropic.Anthropic):
    """A result in parts, a message of the system after the user's, marks for a cache, edits of contexts, and
    more tokens than the context holds."""
    mark = {"type": "ephemeral"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": ARGUMENTS}
    result = [{"type": "text", "text": "4"}, {"type": "text", "text": "2", "cache_control": mark}]
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": mark}]},
        {"role": "system", "content": [{"type": "text", "text": "Agents: none."}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": result}]},
    ]
    tool = {**MESSAGE["tools"][0], "cache_control": mark, "eager_input_streaming": True}
    fields: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": 32000,
        "tools": [tool],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
        "betas": ["context-management-2025-06-27"],
        "messages": messages,
    }
    answer = claude.beta.messages.create(**fields, system=[{"type": "text", "text": "Be nice."}])
    assert [block.text for block in answer.content] == ["The sum is 42."]
    assert answer.stop_reason == "end_turn"
    # A template may refuse a second system message, so that there is one.
    joined = fields | {"messages": [messages[0], *messages[2:]]}
    same = claude.beta.messages.create(**joined, system="Be nice.\n\nAgents: none.")
    assert total_input(same.usage) == total_input(answer.usage)


def total_input(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens


def test_what_codex_sends(gpt: openai.OpenAI):
    """Instructions and a developer's message, and tools that only OpenAI's own service has."""
    fields: dict[str, Any] = {
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "stream_options": {"include_obfuscation": False},
        "extra_body": {"client_metadata": {"id": "1"}},
    }
    others = [{"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch"}]
    spoken = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    told = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
    asked: Any = RESPONSE | fields | {"tools": RESPONSE["tools"] + others}
    *_, last = gpt.responses.create(**asked, instructions="Add.", input=[told, spoken], stream=True)
    assert [item.type for item in last.response.output] == ["reasoning", "message", "function_call"]
    assert [tool.name for tool in last.response.tools] == ["add"]
    same = gpt.responses.create(**RESPONSE, instructions="Add.\n\nBe brief.", input=[spoken])
    assert same.usage.input_tokens == last.response.usage.input_tokens


class Pick(pydantic.BaseModel):
    color: Literal["red", "blue"]


PICK = Pick.model_json_schema()


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "pick"}])
def test_messages_force_a_call(claude: anthropic.Anthropic, choice: Any):
    choice = choice | {"disable_parallel_tool_use": True}
    tools: Any = [{"name": "pick", "input_schema": PICK}]
    answer = claude.messages.create(
        **MESSAGE | {"tools": tools, "max_tokens": 1500}, messages=ASK, tool_choice=choice
    )
    call = answer.content[-1]
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "pick", "tool_use")
    Pick.model_validate(call.input)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "pick"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "pick"}]},
    ],
)
def test_responses_force_a_call(gpt: openai.OpenAI, choice: Any):
    others = RESPONSE["tools"] if isinstance(choice, dict) else []
    tools: Any = [*others, {"type": "function", "name": "pick", "parameters": PICK}]
    answer = gpt.responses.create(
        model="scripted", input=QUESTION, tools=tools, tool_choice=choice, parallel_tool_calls=False
    )
    call = answer.output[-1]
    assert (call.type, call.name, answer.status) == ("function_call", "pick", "completed")
    Pick.model_validate_json(call.arguments)


def test_no_call_where_none_is_wanted(claude: anthropic.Anthropic, gpt: openai.OpenAI):
    said = "Hello there, how are you?"
    message = claude.messages.create(**MESSAGE, messages=ASK, tool_choice={"type": "none"})
    assert [block.text for block in message.content] == [said]
    assert gpt.responses.create(**RESPONSE, input=QUESTION, tool_choice="none").output_text == said


def test_answers_to_a_schema(claude: anthropic.Anthropic, gpt: openai.OpenAI):
    message = claude.messages.parse(model="scripted", max_tokens=1500, messages=ASK, output_format=Pick)
    assert message.parsed_output.color in ("red", "blue")
    answer = gpt.responses.parse(model="scripted", input=QUESTION, text_format=Pick)
    assert answer.output_parsed.color in ("red", "blue")


def test_strict_tools_of_messages_are_followed(claude: anthropic.Anthropic):
    """The model would add 19 and 23, which the schema does not allow."""
    numbers = {"a": {"enum": [1, 2]}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": numbers, "required": ["a"], "additionalProperties": False}
    tools: Any = [{"name": "add", "input_schema": schema, "strict": True}]
    answer = claude.messages.create(
        **MESSAGE | {"tools": tools, "max_tokens": 1500},
        messages=ASK,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert answer.content[-1].input["a"] in (1, 2)


def test_an_answer_that_meets_the_end_of_the_context(claude: anthropic.Anthropic, web: httpx.Client):
    context = web.post("/tokenize", json={"prompt": "a"}).json()["max_model_len"]
    fields: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": ""}]}
    left = context - claude.messages.count_tokens(**fields).input_tokens
    fields["messages"] = [{"role": "user", "content": "a" * (left - 2)}]
    answer = claude.messages.create(**fields, max_tokens=32000)
    assert answer.content[0].text == "Hello there,"
    assert answer.stop_reason == "model_context_window_exceeded"
    assert total_input(answer.usage) + answer.usage.output_tokens == context


def test_an_assistants_last_message_is_gone_on_with(claude: anthropic.Anthropic):
    begun: Any = [*ASK, {"role": "assistant", "content": "The sum "}]
    answer = claude.messages.create(model="scripted", max_tokens=64, messages=begun)
    assert answer.content[0].text == "is 42."


def test_every_protocol_has_a_queue_and_salts_its_prefixes(claude: anthropic.Anthropic, gpt: openai.OpenAI):
    import anthropic

    late = {"extra_body": {"priority": 1}}
    with pytest.raises(anthropic.BadRequestError, match="--scheduling-policy priority"):
        claude.messages.create(**MESSAGE, messages=ASK, **late)
    with pytest.raises(openai.BadRequestError, match="--scheduling-policy priority"):
        gpt.responses.create(**RESPONSE, input=QUESTION, **late)
    for salt, cached in (("a", False), ("a", True), ("b", False)):
        salted = {"extra_body": {"cache_salt": f"responses {salt}"}}
        usage = gpt.responses.create(**RESPONSE, input=QUESTION, **salted).usage
        assert (usage.input_tokens_details.cached_tokens > 0) is cached
        salted = {"extra_body": {"cache_salt": f"messages {salt}"}}
        usage = claude.messages.create(**MESSAGE, messages=ASK, **salted).usage
        assert (usage.cache_read_input_tokens > 0) is cached


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
LOOKED: list[dict[str, Any]] = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]},
]
UNKNOWN = {"type": "object", "properties": {"a": {"not": {}}}}
REFUSED_MESSAGES: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages.0.content.0: type 'image' is not one of",
    ),
    ({"messages": LOOKED}, "messages.1.content.0.content.0: this model takes text only"),
    ({"system": [IMAGE]}, "system.0: this model takes text only"),
    ({"messages": [{"role": "tool", "content": "1"}]}, "messages.0: role 'tool' is not one of"),
    ({"tools": [MESSAGE["tools"][0]] * 513}, "tools: 513 are too many"),
    ({"tool_choice": {"type": "tool", "name": "sub"}}, "'sub' is not the name of a tool (add)"),
    (
        {"tools": [{"name": "f", "strict": True, "input_schema": UNKNOWN}]},
        "tool 'f': schema.properties.a: keyword",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": UNKNOWN}}},
        "output_config.format: schema.properties.a: keyword 'not'",
    ),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
            "tool_choice": {"type": "any"},
        },
        "tool_choice and output_config.format both say",
    ),
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
    ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is kept between requests"),
    ({"tools": [{"type": "file_search"}]}, "tools.0: type 'file_search' is not one of"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools"),
    ({"tools": RESPONSE["tools"] * 513}, "tools: 513 are too many"),
    ({"tool_choice": {"type": "custom", "name": "patch"}}, "tool_choice: type 'custom' is not one of"),
    ({"tools": [{"type": "function"}]}, "name: required"),
    ({"input": []}, "input"),
    ({"input": [{"type": "web_search_call", "id": "1"}]}, "input.0: type 'web_search_call' is not one of"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0: this model takes text only",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "text only"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": UNKNOWN}}},
        "text.format: schema.properties.a: keyword 'not'",
    ),
    (
        {"text": {"format": {"type": "json_object"}}, "tool_choice": "required"},
        "tool_choice and text.format both say",
    ),
    ({"tool_choice": {"type": "function", "name": "sub"}}, "'sub' is not the name of a tool (add)"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]},
        "'c' is not the id of a call",
    ),
    ({"background": True}, "background: "),
    ({"top_logprobs": 2}, "top_logprobs: no log-probabilities are returned here"),
    ({"max_output_tokens": 0}, "max_output_tokens: "),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED_RESPONSES)
def test_responses_are_refused_by_name(web: httpx.Client, fields: dict[str, Any], message: str):
    reply = web.post("/v1/responses", json=RESPONSE | {"input": QUESTION} | fields)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_deep_json_is_refused(web: httpx.Client, path: str):
    reply = web.post(path, content='{"tools": ' + "[" * 5000 + "]" * 5000 + "}")
    assert reply.status_code == 400
    assert "recursion limit" in reply.json()["error"]["message"]


def test_anthropics_clients_have_a_header_for_the_key():
    config = ServerConfig(api_key="secret")
    engine = EngineSupervisor(config)
    web = TestClient(create_app(Control(Service(config, engine), engine)))
    for headers, status, kind in (
        ({}, 401, "authentication_error"),
        ({"x-api-key": "guess"}, 401, "authentication_error"),
        ({"x-api-key": "secret"}, 503, "overloaded_error"),  # nothing is loaded
    ):
        reply = web.post("/v1/messages", json=MESSAGE | {"messages": ASK}, headers=headers)
        assert (reply.status_code, reply.json()["type"]) == (status, "error")
        assert reply.json()["error"]["type"] == kind


def test_errors_that_the_clients_know(claude: anthropic.Anthropic, gpt: openai.OpenAI):
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="serves 'scripted'"):
        claude.messages.create(**MESSAGE | {"model": "other"}, messages=ASK)
    with pytest.raises(anthropic.BadRequestError, match="the context holds"):
        claude.messages.create(**MESSAGE, messages=[{"role": "user", "content": "a" * 5000}])
    with pytest.raises(openai.NotFoundError):
        gpt.responses.create(model="other", input="Hi")
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        gpt.embeddings.create(model="scripted", input="a")
