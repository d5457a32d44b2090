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


def test_errors_are_the_clients_own(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model=MODEL, prompt="hi", temperature=-1)
    assert caught.value.body["type"] == "invalid_request_error"
    assert caught.value.body["param"] == "temperature"
    with pytest.raises(openai.NotFoundError, match="serves 'tiny'") as missing:
        client.completions.create(model="gpt-4", prompt="hi")
    assert missing.value.body["code"] == "model_not_found"
