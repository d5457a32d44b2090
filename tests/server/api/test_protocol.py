"""Request bodies: what is accepted, what is ignored, and how refusals read."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from turnout.server.api.body import UNSUPPORTED
from turnout.server.api.errors import ApiError
from turnout.server.api.openai_responses.body import ResponsesBody
from turnout.server.api.protocol import ChatBody, CompletionBody, TokenizeBody, parse

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"prompt": "hi"} | fields).encode())


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps(HELLO | fields).encode())


def refusal(make: Any, **fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("hi", ["hi"]),
        (["hi", "ho"], ["hi", "ho"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_every_form_of_prompt(prompt: Any, parsed: Any):
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize("prompt", [None, 3, [], [1, "a"], [[1], "a"], [1.5], [True], [["a"]], {}])
def test_other_prompts_are_refused(prompt: Any):
    assert refusal(completion, prompt=prompt).startswith("prompt: must be a string")


def test_all_fields_reach_the_sampler():
    body = completion(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=3,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        include_stop_str_in_output=True,
        logit_bias={"5": -100, "6": 1.5},
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logprobs=2,
        echo=True,
    )
    sampling = body.sampling(9, vocab_size=10)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (9, 2, 3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), (4,))
    assert sampling.ignore_eos
    assert sampling.include_stop_str_in_output
    assert sampling.logit_bias == {5: -100.0, 6: 1.5}
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert sampling.repetition_penalty == 1.1
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 2)


def test_defaults_are_openais():
    sampling = completion().sampling(16, vocab_size=10)
    assert (sampling.temperature, sampling.top_p, sampling.logprobs) == (1.0, 1.0, None)
    assert chat(logprobs=True, top_logprobs=3).sampling(1, 10).logprobs == 3
    assert chat(logprobs=True).sampling(1, 10).logprobs == 0
    assert chat(max_completion_tokens=5).max_tokens == 5


def test_null_stands_for_the_default():
    body = completion(temperature=None, stop=None, logit_bias=None, stream=None, n=None, stream_options=None)
    assert body.sampling(16, vocab_size=10) == completion().sampling(16, vocab_size=10)


def test_fields_that_cannot_matter_are_ignored():
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    nothing = {"functions": [], "function_call": "none", "response_format": {"type": "text"}, "audio": None}
    nothing |= {"structured_outputs": {}, "guided_json": None, "guided_decoding_backend": "auto"}
    body = chat(**ignored, **nothing)
    assert body.restrictions() == {}
    assert body.model_copy(update={"response_format": None, "structured_outputs": None}) == chat()
    assert completion(suffix="", best_of=1, user="me") == completion()


# What sglang-router 0.3.2 and vllm-router 0.1.17 make of {"model", "messages" or "prompt", "max_tokens"}.
BEHIND_SGLANG_ROUTER = {
    "logprobs": False,
    "max_completion_tokens": 3,
    "stream": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
}
BEHIND_VLLM_ROUTER = {
    "max_tokens": 3,
    "logprobs": False,
    "stream": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "continue_final_message": False,
    "skip_special_tokens": True,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}
BEHIND_EITHER = {
    "max_tokens": 3,
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
# The defaults of vLLM's ChatCompletionRequest that are not null, which typed clients of it send.
TYPED_FOR_VLLM = {
    "logprobs": False,
    "top_logprobs": 0,
    "n": 1,
    "stop": [],
    "stream": False,
    "tool_choice": "none",
    "include_reasoning": True,
    "parallel_tool_calls": True,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "bad_words": [],
    "echo": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "priority": 0,
}


@pytest.mark.parametrize("fields", [BEHIND_SGLANG_ROUTER, BEHIND_VLLM_ROUTER, TYPED_FOR_VLLM])
def test_what_routers_and_typed_clients_add_to_a_chat_changes_nothing(fields: dict[str, Any]):
    body, plain = chat(**fields), chat(max_tokens=fields.get("max_tokens"))
    assert body.sampling(3, 10) == plain.sampling(3, 10)
    unsaid = {"add_generation_prompt": None}  # stands for true: no message is continued
    assert body.template_options() | unsaid == plain.template_options() | unsaid


def test_what_routers_add_to_a_completion_changes_nothing():
    assert completion(**BEHIND_EITHER).sampling(3, 10) == completion(max_tokens=3).sampling(3, 10)


def test_every_unsupported_field_is_accepted_at_its_neutral_values_and_refused_at_others():
    for name, neutral in UNSUPPORTED.items():
        make = chat if name in CompletionBody.model_fields else completion
        for value in (None, *neutral):
            assert make(**{name: value}) == make()
        other = [value for value in ("x", 7, False, {"a": 1}) if value not in neutral][-1]
        assert refusal(make, **{name: other}).startswith(
            f"{name}: not supported by this server; leave it out"
        )


def test_sglangs_and_vllms_names_for_the_same_field():
    assert completion(no_stop_trim=True).sampling(1, 10).include_stop_str_in_output
    assert completion(rid="mine").chosen_id == completion(request_id="mine").chosen_id == "mine"
    assert completion().chosen_id is None


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"self": 1, "anything": [2]}}, {"self": 1, "anything": [2]}),
        (
            {"reasoning_effort": "none"},
            {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
            {"enable_thinking": True, "thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
def test_variables_of_the_chat_template(fields: dict[str, Any], variables: dict[str, Any]):
    """An effort switches thinking as in vLLM and SGLang, unless it is switched by name."""
    assert chat(**fields).template_options() == chat().template_options() | variables


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_token": 3}, "max_token: unknown field; did you mean max_tokens?"),
        ({"zzz": 3}, "zzz: unknown field"),
        ({"suffix": "end"}, 'suffix: not supported by this server; leave it out, or send ""'),
        ({"best_of": 3}, "best_of: not supported by this server; leave it out, or send 1"),
        (
            {"truncate_prompt_tokens": 0},
            "truncate_prompt_tokens: must be at least 1, or -1 for as many as fit; 0 leaves no prompt",
        ),
        (
            {"truncate_prompt_tokens": -2},
            "truncate_prompt_tokens: Input should be greater than or equal to -1",
        ),
        ({"rid": ""}, "rid: String should have at least 1 character"),
        ({"rid": "a", "request_id": "b"}, "rid and request_id differ; give one of them"),
        ({"max_tokens": "3"}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 1.5}, "max_tokens: Input should be a valid integer"),
        ({"logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0: Input should be greater than or equal to 0"),
        ({"stop": {}}, "stop: must be a string or a list of strings"),
        ({"stop": False}, "stop: must be a string or a list of strings"),
        (
            {"use_beam_search": 0},
            "use_beam_search: not supported by this server; leave it out, or send false",
        ),
        ({"n": 0}, "n: Input should be greater than or equal to 1"),
        ({"stop": [1]}, "stop: must be a string or a list of strings"),
        ({"stop": ["x"] * 65}, "stop: at most 64 stop strings"),
        ({"logit_bias": [1]}, "logit_bias: must map token ids to numbers"),
        ({"logit_bias": {"a": 1}}, "logit_bias: key 'a' is not a token id in decimal digits"),
        *(
            ({"logit_bias": {key: 1}}, f"logit_bias: key {key[:20]!r} is not a token id in decimal digits")
            for key in ("", "\u0665", " 5", "5_0", " 5_0", "05", "+5", "-1", "5.0", "1e1", "9" * 5000)
        ),
        *(
            ({"logit_bias": {"5": bias}}, "logit_bias: token 5: the bias must be a number in [-100, 100]")
            for bias in (True, False, None, "1", [1], math.nan, math.inf, -math.inf, 10**400, 101)
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options is only allowed when stream is true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x: unknown field"),
        ({"a": 1, "b": 2}, "a: unknown field; b: unknown field"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], message: str):
    assert refusal(completion, **fields) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function: required"),
        (
            {"response_format": {"type": "structural_tag"}},
            "response_format.type: Input should be 'text', 'json",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            'response_format: json_schema: goes with type "json_s',
        ),
        (
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "regex and response_format both say what the answer must be; give one",
        ),
        ({"guided_choice": []}, "guided_choice: List should have at least 1 item"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn: unknown field"),
        (
            {"structured_outputs": {"disable_any_whitespace": True, "whitespace_pattern": " "}},
            "structured_outputs: disable_any_whitespace and whitespace_pattern exclude each other",
        ),
        ({"top_logprobs": 2}, "top_logprobs is only allowed when logprobs is true"),
        ({"logprobs": 2}, "logprobs: Input should be a valid boolean"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens and max_completion_tokens differ"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: required"),
        ({"messages": [{"role": "system", "content": None}]}, "messages.0.content: required"),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages.0.content: must be a text or a list of parts",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}]},
                f"messages.0.content: part 1 is of type {kind!r}, but this model takes text only",
            )
            for kind in ("image_url", "input_audio", "video_url", "file", "refusal")
        ),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content: part 0 must be an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content: part 0: its text must be a string",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages.0.content: part 0: unknown field 'x'",
        ),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: Input should be an object"),
        *(
            ({"chat_template_kwargs": {name: []}}, f"chat_template_kwargs: '{name}' is no")
            for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize")
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort and chat_template_kwargs.reasoning_effort differ",
        ),
        ({"reasoning_effort": "enormous"}, "reasoning_effort: Input should be 'none', 'minimal'"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message and add"),
        ({"return_hidden_states": True}, "return_hidden_states: not supported by this server"),
        ({"messages": [{"role": "poet", "content": ""}]}, "messages.0.role: Input should be"),
    ],
)
def test_chat_refusals_name_the_field(fields: dict[str, Any], message: str):
    assert refusal(chat, **fields).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"stop": [""]}, "stop=('',)"),
        ({"logit_bias": {"10": 1}}, "logit_bias: token id 10 does not lie in [0, 10)"),
        ({"min_tokens": 20}, "min_tokens=20"),
    ],
)
def test_values_out_of_range(fields: dict[str, Any], message: str):
    body = completion(**fields)
    assert refusal(lambda: body.sampling(16, vocab_size=10)).startswith(message)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "seed": 99999999999999999999999}',
        b"[" * 100_000,
        b"3",
        b"[]",
        b"null",
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes):
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, raw).sampling(16, 10)
    assert caught.value.status == 400
    assert caught.value.message


@pytest.mark.parametrize("value", [0, 0.0, True, "false"])
def test_what_must_be_false_is_no_number(value: Any):
    body = {"input": "a", "background": value}
    with pytest.raises(ApiError, match="background: "):
        parse(ResponsesBody, json.dumps(body).encode())
    assert parse(ResponsesBody, json.dumps(body | {"background": False}).encode()).background is False


def test_message_parts_and_the_developer_role():
    body = chat(
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
            },
            {"role": "assistant", "content": "yes", "tool_calls": None, "refusal": None},
            {"role": "assistant", "content": None},
            {"role": "assistant"},
            {"role": "assistant", "content": "4", "reasoning_content": "2+2"},
            {"role": "assistant", "content": "4", "reasoning": "2+2", "reasoning_content": None},
            {"role": "user", "content": "hi", "name": "Ann"},
        ]
    )
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert [message.for_template() for message in body.messages] == [
        {"role": "system", "content": "be kind"},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        thought,
        thought,
        {"role": "user", "content": "hi", "name": "Ann"},
    ]


def test_tokenize_takes_one_of_prompt_and_messages():
    assert refusal(lambda: parse(TokenizeBody, b"{}")) == "give either prompt or messages"
    with pytest.raises(ApiError, match="are for messages, not for a prompt"):
        parse(TokenizeBody, b'{"prompt": "a", "continue_final_message": true}')
