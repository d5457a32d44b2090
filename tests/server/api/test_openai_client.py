"""The official client against a real server, and its answers against transformers."""

from __future__ import annotations

import math

import httpx
import openai
import pytest
import torch

PROMPT = "Twelve pears and seven plums"
MODEL = "tiny"


@torch.no_grad()
def greedy(model, ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """`count` greedy tokens after `ids`, by running the whole sequence again for each; log-probabilities
    [len(ids) + count - 1, V] of every position."""
    known = list(ids)
    for _ in range(count):
        scores_LV = torch.log_softmax(model(torch.tensor([known])).logits[0].float(), -1)
        known.append(int(scores_LV[-1].argmax()))
    return known[len(ids) :], scores_LV


def approx(logprobs: list[float | None]) -> list[object]:
    """Equal but for the rounding of another batch shape; None only to None."""
    return [value if value is None else pytest.approx(value, abs=1e-4) for value in logprobs]


def test_models(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_is_what_transformers_computes(client: openai.OpenAI, reference, tokenizer):
    ids = tokenizer.encode(PROMPT)
    expected, scores = greedy(reference, ids, 12)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3, extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    assert choice.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 12)
    for i, token in enumerate(expected):
        row = scores[len(ids) - 1 + i]
        assert choice.logprobs.token_logprobs[i] == pytest.approx(row[token].item(), abs=1e-3)
        best = sorted(choice.logprobs.top_logprobs[i].values(), reverse=True)
        assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def test_echo_reports_the_prompt(client: openai.OpenAI, reference, tokenizer):
    ids = tokenizer.encode(PROMPT)
    _, scores = greedy(reference, ids, 1)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text == PROMPT
    logprobs = choice.logprobs
    assert logprobs.tokens == list(PROMPT)
    assert logprobs.text_offset == list(range(len(PROMPT)))
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    expected = [scores[i, token].item() for i, token in enumerate(ids[1:])]
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert [max(top.values()) for top in logprobs.top_logprobs[1:]] == pytest.approx(
        scores[: len(ids) - 1].max(-1).values.tolist(), abs=1e-3
    )
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize(("interval", "most"), [(None, 10), (1, 10), (4, 4), (50, 2)])
def test_streams_come_in_as_many_parts_as_are_asked_for(
    client: openai.OpenAI, interval: int | None, most: int
):
    """The first token, then `interval` at a time, and fewer parts where the server is behind."""
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "logprobs": 1}
    extra = {"ignore_eos": True} | ({} if interval is None else {"stream_interval": interval})
    whole = client.completions.create(**fields, extra_body={"ignore_eos": True})
    parts = [
        event.choices[0]
        for event in client.completions.create(**fields, stream=True, extra_body=extra)
        if event.choices
    ]
    assert "".join(part.text for part in parts) == whole.choices[0].text
    sizes = [len(part.logprobs.tokens) for part in parts]
    assert sum(sizes) == 10
    assert len(sizes) <= most
    assert parts[-1].finish_reason == "length"


def test_an_interval_of_no_tokens_is_refused(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="stream_interval"):
        client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"stream_interval": 0})


@pytest.mark.parametrize("echo", [False, True])
def test_streaming_adds_up_to_the_whole(client: openai.OpenAI, echo: bool):
    fields = {
        "model": MODEL,
        "prompt": [PROMPT, "Another"],
        "max_tokens": 10,
        "temperature": 0,
        "logprobs": 1,
        "n": 2,
        "echo": echo,
    }
    whole = client.completions.create(**fields)
    texts, tokens, reasons = {}, {}, {}
    parts = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    for part in parts[:-1]:
        assert part.usage is None
        (choice,) = part.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        tokens.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
        reasons[choice.index] = choice.finish_reason
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert parts[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert [c.index for c in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert tokens[choice.index] == approx(choice.logprobs.token_logprobs)
        assert reasons[choice.index] == choice.finish_reason == "length"


def test_chat(client: openai.OpenAI, http: httpx.Client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    rendered = "system: Be brief.\nuser: Why?\nassistant: "
    plain = client.completions.create(model=MODEL, prompt=rendered, max_tokens=8, temperature=0)
    (choice,) = chat.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == plain.choices[0].text
    assert chat.usage.prompt_tokens == len(rendered)
    ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": rendered}


def test_chat_streaming_and_logprobs(client: openai.OpenAI):
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Why?"}],
        "max_completion_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**fields)
    parts = list(client.chat.completions.create(**fields, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    streamed = [
        entry for part in parts if part.choices[0].logprobs for entry in part.choices[0].logprobs.content
    ]
    assert len(streamed) == 8
    for entry, other in zip(streamed, whole.choices[0].logprobs.content, strict=True):
        assert (entry.token, entry.logprob) == (other.token, pytest.approx(other.logprob, abs=1e-4))
    for entry in streamed:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


def test_chat_without_a_limit_fills_the_context(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x" * 480}],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI):
    ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    text = client.completions.create(**ask).choices[0].text
    stop = text[8:11]
    stopped = client.completions.create(**ask, stop=[stop, "never"])
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    streamed = client.completions.create(**ask, stop=stop, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == text[: text.index(stop)]


def test_seeds_repeat_and_choices_differ(client: openai.OpenAI):
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=16, temperature=1.5, seed=seed, n=3
        )
        return [choice.text for choice in answer.choices]

    assert texts(1) == texts(1)
    assert len(set(texts(1))) == 3
    assert texts(1) != texts(2)


def test_a_bias_decides(client: openai.OpenAI, tokenizer):
    (letter,) = tokenizer.encode("q")
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, logit_bias={str(letter): 100}
    )
    assert answer.choices[0].text == "qqqq"


def test_parts_of_characters(client: openai.OpenAI, tokenizer):
    """é is two tokens: neither is text alone, and together they are one character."""
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    answer = client.completions.create(model=MODEL, prompt="né!", max_tokens=0, echo=True, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["n", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs.text_offset == [0, 1, 2, 2]
    biased = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=1,
        temperature=0,
        logprobs=True,
        logit_bias={str(ids[0]): 100},
    )
    assert biased.choices[0].message.content == "\ufffd"
    (entry,) = biased.choices[0].logprobs.content
    assert entry.bytes == [0xC3]
    assert math.isfinite(entry.logprob)


QUESTION = [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (QUESTION, {"chat_template_kwargs": {"enable_thinking": False}}),
        (QUESTION, {"chat_template_kwargs": {"enable_thinking": True, "nobody_reads_this": [1]}}),
        (QUESTION, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        (QUESTION, {"add_generation_prompt": False}),
        ([*QUESTION, {"role": "assistant", "content": "Because "}], {"continue_final_message": True}),
        ([*QUESTION, {"role": "assistant", "content": "Because "}], {"add_generation_prompt": False}),
        ([*QUESTION, {"role": "assistant", "content": "4", "reasoning_content": "2+2"}, *QUESTION], {}),
        ([{"role": "user", "content": "Why?", "name": "Ann"}], {}),
    ],
)
def test_prompts_of_chats_are_transformers(client, http, tokenizer, messages, fields):
    """The ids that the template gives, and the answer to them."""
    variables = dict(fields)
    variables |= variables.pop("chat_template_kwargs", {})
    variables = {"add_generation_prompt": not fields.get("continue_final_message"), **variables}
    ids = tokenizer.apply_chat_template(messages, return_dict=False, **variables)
    assert http.post("/tokenize", json={"messages": messages} | fields).json()["tokens"] == ids
    settings = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    answer = client.chat.completions.create(messages=messages, extra_body=fields, **settings)
    plain = client.completions.create(prompt=ids, **settings)
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.usage.prompt_tokens == len(ids)


def test_an_effort_of_none_switches_thinking_off(client: openai.OpenAI, tokenizer):
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=1, reasoning_effort="none"
    )
    expected = tokenizer.apply_chat_template(
        QUESTION,
        add_generation_prompt=True,
        return_dict=False,
        enable_thinking=False,
        reasoning_effort="none",
    )
    assert answer.usage.prompt_tokens == len(expected)


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI):
    settings = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    first = client.chat.completions.create(messages=QUESTION, **settings).choices[0].message
    silent = {"role": "assistant", "content": None, "tool_calls": [], "function_call": None, "audio": None}
    for said in (first, first.model_dump(), silent):
        answer = client.chat.completions.create(messages=[*QUESTION, said, *QUESTION], **settings)
        assert answer.choices[0].finish_reason == "length"


def test_special_tokens_can_be_seen(client: openai.OpenAI, http: httpx.Client, tokenizer):
    (pad,) = tokenizer.encode("<|pad|>")
    ask = {"model": MODEL, "prompt": "a", "max_tokens": 2, "temperature": 0, "logit_bias": {str(pad): 100}}
    for skip in (True, False):
        expected = tokenizer.decode([pad, pad], skip_special_tokens=skip)
        for spaces in (True, False):
            fields = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
            answer = client.completions.create(**ask, extra_body=fields)
            assert answer.choices[0].text == expected
        body = {"tokens": [pad, pad], "skip_special_tokens": skip}
        assert http.post("/detokenize", json=body).json() == {"prompt": expected}
    assert expected == "<|pad|><|pad|>"


def test_the_end_of_a_prompt_can_be_asked_for(client: openai.OpenAI):
    settings = {"model": MODEL, "temperature": 0, "extra_body": {"truncate_prompt_tokens": 5}}
    short = client.completions.create(model=MODEL, temperature=0, prompt=PROMPT[-5:], max_tokens=4)
    long = client.completions.create(prompt=PROMPT, max_tokens=4, **settings)
    assert long.choices[0].text == short.choices[0].text
    assert long.usage.prompt_tokens == 5
    echoed = client.completions.create(prompt=PROMPT, max_tokens=0, echo=True, **settings)
    assert echoed.choices[0].text == PROMPT[-5:]
    fields = {"truncate_prompt_tokens": -1, "ignore_eos": True}
    full = client.completions.create(model=MODEL, prompt="x" * 600, max_tokens=12, extra_body=fields)
    assert (full.usage.prompt_tokens, full.usage.completion_tokens) == (500, 12)
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, extra_body=fields)
    assert chat.usage.prompt_tokens == len("user: Why?\nassistant: ")


def test_a_request_has_the_name_that_its_client_gave(client: openai.OpenAI):
    ask = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 8}
    with client.completions.create(**ask, stream=True, extra_body={"rid": "mine/1"}) as stream:
        # Names need not be unique, and one that is in use does no harm.
        again = client.completions.create(**ask, extra_body={"request_id": "mine/1"})
        assert {again.id, *(part.id for part in stream)} == {"mine/1"}
    assert client.completions.create(**ask).id.startswith("cmpl-")


def test_errors_are_the_clients_own(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model=MODEL, prompt="hi", temperature=-1)
    assert caught.value.body["type"] == "invalid_request_error"
    assert caught.value.body["param"] == "temperature"
    with pytest.raises(openai.NotFoundError, match="serves 'tiny'") as missing:
        client.completions.create(model="gpt-4", prompt="hi")
    assert missing.value.body["code"] == "model_not_found"
