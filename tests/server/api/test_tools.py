"""Tools and reasoning in chat: the official client against a real server of a model that calls tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
QUESTION = {"role": "user", "content": "What is 19 + 23"}
FIELDS: dict[str, Any] = {"model": "scripted", "tools": [ADD], "messages": [QUESTION]}
THOUGHT, TEXT = "The user wants a sum.", "I will add."
ARGUMENTS = {"a": 19, "b": 23}


@pytest.fixture(scope="module")
def agent(scripted: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture
def web(scripted: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted, timeout=60) as web:
        yield web


class Add(pydantic.BaseModel):
    a: int
    b: int


def add(a: int, b: int) -> int:
    return a + b


def test_a_loop_that_runs_its_tool(agent: openai.OpenAI):
    messages: list[Any] = [QUESTION]
    while True:
        answer = agent.chat.completions.create(**FIELDS | {"messages": messages})
        (choice,) = answer.choices
        messages.append(choice.message.model_dump(exclude_none=True))
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls:
            result = {"add": add}[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    assert choice.finish_reason == "stop"
    assert choice.message.content == "The sum is 42."  # the model says otherwise after another result
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == TEXT
    assert messages[1]["reasoning_content"] == messages[1]["reasoning"] == THOUGHT


def test_a_stream_adds_up_to_the_whole(agent: openai.OpenAI):
    (whole,) = agent.chat.completions.create(**FIELDS).choices
    parts = list(agent.chat.completions.create(**FIELDS, stream=True, stream_options={"include_usage": True}))
    deltas = [part.choices[0].delta for part in parts if part.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content == TEXT
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == whole.message.reasoning_content == THOUGHT
    begun, *more = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (begun.index, begun.type, begun.function.name) == (0, "function", "add")
    assert begun.id
    assert all((call.index, call.id, call.function.name) == (0, None, None) for call in more)
    # As the model writes them; the last brace waits until the call is complete.
    assert [call.function.arguments for call in (begun, *more)] == ["", '{"a": 19, ', '"b": 23', "}"]
    assert json.loads(whole.message.tool_calls[0].function.arguments) == ARGUMENTS
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "tool_calls"
    usage = parts[-1].usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_reasoning_is_streamed_as_it_is_written(agent: openai.OpenAI):
    """What gathered while the server was busy comes in one piece, so one stream of several shows it."""

    def pieces() -> int:
        stream = agent.chat.completions.create(**FIELDS, stream=True)
        deltas = [part.choices[0].delta for part in stream if part.choices]
        return sum(bool(getattr(delta, "reasoning_content", None)) for delta in deltas)

    assert any(pieces() > 1 for _ in range(20))


def test_the_clients_own_accumulator(agent: openai.OpenAI):
    tools = [openai.pydantic_function_tool(Add, name="add")]
    with agent.chat.completions.stream(**FIELDS | {"tools": tools}) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in events
    (call,) = final.choices[0].message.tool_calls
    # The client makes its tools strict, and masks refuse the script's token that goes from within the name of
    # the field on past the number; so the numbers are others.
    assert isinstance(call.function.parsed_arguments, Add)


def ask(web: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = web.post("/v1/chat/completions", json=FIELDS | fields)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    return choice


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_two_calls_and_only_one(web: httpx.Client):
    both = ask(web, messages=user("Add both!"))
    arguments = [json.loads(call["function"]["arguments"]) for call in both["message"]["tool_calls"]]
    assert arguments == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert both["message"]["content"] is None
    assert len({call["id"] for call in both["message"]["tool_calls"]}) == 2
    one = ask(web, messages=user("Add both!"), parallel_tool_calls=False)
    assert [json.loads(call["function"]["arguments"]) for call in one["message"]["tool_calls"]] == arguments[
        :1
    ]
    assert one["finish_reason"] == both["finish_reason"] == "tool_calls"


def test_what_is_no_call_is_text(web: httpx.Client):
    choice = ask(web, messages=user("Add?"))
    assert choice["message"]["content"] == "Well: <tool_call>add(19, 23)</tool_call>. That was it."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("max_tokens", [6, 7, 8, 9, 10])
def test_a_call_that_is_cut_off_is_text(web: httpx.Client, max_tokens: int):
    choice = ask(web, max_tokens=max_tokens)
    calls = choice["message"].get("tool_calls", [])
    assert [json.loads(call["function"]["arguments"]) for call in calls] in ([], [ARGUMENTS])
    assert choice["message"]["content"].startswith(TEXT)
    assert bool(calls) != ("<tool_call>" in choice["message"]["content"])
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [7, 8, 9, 10])
def test_a_streamed_call_that_is_cut_off_is_never_json(agent: openai.OpenAI, max_tokens: int):
    parts = list(agent.chat.completions.create(**FIELDS, stream=True, max_tokens=max_tokens))
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
    arguments = "".join(call.function.arguments for call in calls)
    expected = {7: "", 8: '{"a": 19, ', 9: '{"a": 19, "b": 23}', 10: '{"a": 19, "b": 23'}
    assert arguments == expected[max_tokens]  # in the last a mark that is not whole
    begun = max_tokens >= 8
    assert bool(calls) == begun
    said = "".join(part.choices[0].delta.content or "" for part in parts)
    assert said.startswith(TEXT)
    assert ("<tool_call>" in said) != begun
    assert parts[-1].choices[0].finish_reason == "length"


def test_a_streamed_call_that_was_no_json_can_be_sent_back(web: httpx.Client):
    """With the error that its client found, so that the model can try again."""
    lengths = []
    for arguments in ("{}", '{"a": 1,,', '{"a": "'):
        call = CALL | {"function": {"name": "add", "arguments": arguments}}
        told = [QUESTION, {"role": "assistant", "tool_calls": [call]}]
        told.append({"role": "tool", "tool_call_id": call["id"], "content": "no JSON: 2"})
        reply = web.post("/tokenize", json={"messages": told, "tools": [ADD]})
        assert reply.status_code == 200, reply.text
        lengths.append(reply.json()["count"])
        assert ask(web, messages=told)["message"]["content"] is not None
    assert lengths[0] < lengths[2] < lengths[1]  # the model sees what it wrote


def test_streamed_calls_keep_apart_and_only_one_comes_where_one_is_wanted(agent: openai.OpenAI):
    for parallel, expected in ((True, [{"a": 1, "b": 2}, {"a": 3, "b": 4}]), (False, [{"a": 1, "b": 2}])):
        arguments: dict[int, str] = {}
        fields = FIELDS | {"messages": user("Add both!"), "parallel_tool_calls": parallel}
        for part in agent.chat.completions.create(**fields, stream=True):
            for call in part.choices[0].delta.tool_calls or ():
                arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
        assert [json.loads(arguments[index]) for index in sorted(arguments)] == expected
        assert part.choices[0].finish_reason == "tool_calls"


PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"color": {"enum": ["red", "blue"]}},
            "required": ["color"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_forced_call(web: httpx.Client, choice: Any, thinks: bool):
    """The model would call `add`; it cannot, and its thoughts are as they were."""
    fields = {
        "tools": [PICK],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 1500,
        "seed": 1,
    }
    answer = ask(web, **fields, chat_template_kwargs={"enable_thinking": thinks})
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert json.loads(call["function"]["arguments"])["color"] in ("red", "blue")
    assert answer["message"].get("reasoning") == (THOUGHT if thinks else None)
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_allowed_tools_are_called(web: httpx.Client, mode: str):
    """The model would call `add`, of which it is told as before."""
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "pick"}}]}
    fields = {
        "tools": [ADD, PICK],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
        "parallel_tool_calls": False,
        "max_tokens": 1500,
        "seed": 1,
    }
    bodies = [FIELDS | fields, FIELDS | fields | {"tool_choice": None}]
    replies = [web.post("/v1/chat/completions", json=body).json() for body in bodies]
    (answer,), (free,) = (reply["choices"] for reply in replies)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert free["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert replies[0]["usage"]["prompt_tokens"] == replies[1]["usage"]["prompt_tokens"]
    assert (TEXT in (answer["message"]["content"] or "")) is (mode == "auto")


def test_what_looks_like_a_token_in_a_schema_is_text(web: httpx.Client):
    """Grammars name tokens so, those of marks among them."""
    properties = {"a": {"enum": ["<[7]>"], "description": "As in <[123456]>."}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 1500}
    (call,) = ask(web, tools=[tool], **forced)["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "<[7]>"}


def test_a_template_that_wants_the_system_first_gets_it_so(web: httpx.Client):
    system = [
        {"role": role, "content": text} for role, text in (("system", "Add."), ("developer", "Be brief."))
    ]
    together = {"role": "system", "content": "Add.\n\nBe brief."}
    tokens = [
        web.post("/v1/chat/completions", json=FIELDS | {"messages": messages}).json()["usage"][
            "prompt_tokens"
        ]
        for messages in ([*system, QUESTION], [system[0], QUESTION, system[1]], [together, QUESTION])
    ]
    assert tokens[0] == tokens[1] == tokens[2]


def test_what_agents_add_to_messages(web: httpx.Client):
    """Marks for other services' caches, and what others put into their answers."""
    mark = {"cache_control": {"type": "ephemeral"}}
    earlier = {"role": "assistant", "content": "Ask.", "reasoning_details": [], "annotations": []}
    parts = [{"type": "text", "text": "What is 19"}, {"type": "text", "text": " + 23", **mark}]
    asked = [earlier, {"role": "user", "content": parts}]
    plain = [{"role": "assistant", "content": "Ask."}, QUESTION]
    tokens = [
        web.post("/v1/chat/completions", json=FIELDS | fields).json()["usage"]["prompt_tokens"]
        for fields in ({"messages": asked, "tools": [ADD | mark]}, {"messages": plain})
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("thinks", [False, True])
def test_a_strict_tool_is_called_by_its_schema_among_text(web: httpx.Client, thinks: bool):
    """The model would add 19 and 23, which the schema does not allow; all before the call is as it was."""
    numbers = {"a": {"enum": [1, 2]}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": numbers, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": schema}}
    fields: dict[str, Any] = {"tools": [tool], "parallel_tool_calls": False, "max_tokens": 1500, "seed": 1}
    answer = ask(web, **fields, chat_template_kwargs={"enable_thinking": thinks})
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    assert answer["message"]["content"] == TEXT
    assert answer["message"].get("reasoning") == (THOUGHT if thinks else None)


def test_reasoning_stays_outside_the_schema_of_the_answer(web: httpx.Client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    named = {"name": "answer", "schema": schema | {"additionalProperties": False}}
    answer = ask(web, response_format={"type": "json_schema", "json_schema": named}, max_tokens=1500, seed=1)
    assert answer["message"]["reasoning"] == THOUGHT
    assert json.loads(answer["message"]["content"])["ok"] in (True, False)


def test_tools_that_are_not_offered(web: httpx.Client):
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        choice = ask(web, **fields)
        assert choice["message"]["content"] == "Hello there, how are you?"
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "off", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}]
)
def test_without_thinking(web: httpx.Client, off: dict[str, Any]):
    choice = ask(web, **off)
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"] == TEXT
    assert len(choice["message"]["tool_calls"]) == 1


def test_where_reasoning_goes(web: httpx.Client):
    assert ask(web, include_reasoning=False)["message"].keys() == {"role", "content", "refusal", "tool_calls"}
    together = ask(web, separate_reasoning=False)["message"]
    assert together["content"] == f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}"
    with web.stream(
        "POST", "/v1/chat/completions", json=FIELDS | {"stream": True, "stream_reasoning": False}
    ) as reply:
        data = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    deltas = [part["choices"][0]["delta"] for part in data]
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == [THOUGHT]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CALLED = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: required"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: "),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
    (
        {"tools": [{"type": "custom", "custom": {"name": "patch"}}]},
        "tools.0.type: tools of free-form text (custom) are not served; offer a function with one parameter",
    ),
    ({"tools": [ADD, ADD]}, "two have the name 'add'"),
    ({"tools": [ADD] * 513}, "tools: 513 are too many; at most 512"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        '"object"',
    ),
    (
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "both say what the answer must be",
    ),
    (
        {"tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "'sub' is not the name of a tool (add)",
    ),
    ({"tool_choice": {"type": "allowed_tools"}}, "allowed_tools: required"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: type 'any' is not one of"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        "tools: List should have at least 1 item",
    ),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "sub"}}],
                },
            }
        },
        "'sub' is not the name of a tool (add)",
    ),
    ({"tools": [], "tool_choice": "required"}, "there are no tools"),
    (
        {"messages": [QUESTION, {"role": "tool", "content": "42", "tool_call_id": "c1"}]},
        "messages: 1.tool_call_id",
    ),
    (
        {"messages": [*CALLED, {"role": "tool", "content": "42", "tool_call_id": "c2"}]},
        "'c2' is not the id of a call",
    ),
    ({"messages": [*CALLED, {"role": "tool", "content": "42"}]}, "messages.2: tool_call_id: required"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "only an assistant calls tools"),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}
            ]
        },
        "arguments of 'f': must be the text of a JSON object",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "text only",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "text only"),
    (
        {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}},
        "reasoning_effort and chat_template_kwargs.reasoning_effort differ",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_bad_tools_are_refused_by_name(web: httpx.Client, fields: dict[str, Any], message: str):
    reply = web.post("/v1/chat/completions", json=FIELDS | fields)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_deep_json_is_refused(web: httpx.Client):
    deep = json.dumps(FIELDS).replace('"integer"', "[" * 5000 + "]" * 5000)
    reply = web.post("/v1/chat/completions", content=deep)
    assert reply.status_code == 400
    assert "JSON" in reply.json()["error"]["message"]


def test_models_that_take_no_tools(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="chat template shows no tools"):
        client.chat.completions.create(**FIELDS | {"model": "tiny"})
