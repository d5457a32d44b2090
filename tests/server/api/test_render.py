"""Response objects from deltas, without a server: names, offsets and what several deltas add up to."""

from __future__ import annotations

import json
import math

import pytest

from tests.tiny import write_tokenizer
from turnout.engine.messages import TokenLogprobs
from turnout.engine.sampling.detokenizer import TextStream
from turnout.engine.sampling_params import SamplingParams
from turnout.engine.tokenizer import Tokenizer
from turnout.server.api.generation import Choice, Delta
from turnout.server.api.parsing.parts import Text
from turnout.server.api.protocol import ChatBody, CompletionBody, parse
from turnout.server.api.render import ChatRenderer, CompletionRenderer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.load(folder)


def choice(tokenizer: Tokenizer, prompt: str, index: int = 0) -> Choice:
    sampling = SamplingParams()
    return Choice(index, tokenizer.encode(prompt), sampling, TextStream(tokenizer, sampling))


def entry(token: int, logprob: float = -1.0, top: list[tuple[int, float]] | None = None) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, 1, top if top is not None else [(token, logprob)])


def completion(**fields: object) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"prompt": "ab", "logprobs": 1} | fields).encode())


def test_offsets_continue_over_deltas_and_count_characters(tokenizer: Tokenizer):
    renderer = CompletionRenderer(tokenizer, completion(echo=True))
    one = choice(tokenizer, "ab")
    accent, pear = tokenizer.encode("é"), tokenizer.encode("🍐")
    first = Delta(
        parts=[Text("é")],
        logprobs=[entry(accent[0]), entry(accent[1])],
        prompt_logprobs=[None, entry(one.prompt_ids[1])],
        first=True,
    )
    later = Delta(parts=[Text("🍐!")], logprobs=[entry(t) for t in (*pear, *tokenizer.encode("!"))])
    parts = [*renderer.chunks(one, first), *renderer.chunks(one, later)]
    assert [part["text"] for part in parts] == ["abé", "🍐!"]
    assert parts[0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert parts[1]["logprobs"]["text_offset"] == [3, 4, 4, 4, 4]
    first.add(later)
    whole = CompletionRenderer(tokenizer, completion(echo=True)).answer(one, first)
    assert whole["text"] == "abé🍐!"
    for name, values in whole["logprobs"].items():
        assert values == parts[0]["logprobs"][name] + parts[1]["logprobs"][name]


def test_names_of_tokens_are_distinct_keys(tokenizer: Tokenizer):
    """Parts of characters and tokens without text must not fall on each other in the dictionary."""
    halves = tokenizer.encode("é")
    top = [(halves[0], -0.1), (halves[1], -0.2), (300, -0.3), (301, -0.4), (257, -0.5)]
    delta = Delta(logprobs=[entry(5, -math.inf, top)])
    (rendered,) = CompletionRenderer(tokenizer, completion()).chunks(choice(tokenizer, "ab"), delta)
    assert rendered["logprobs"]["token_logprobs"] == [-9999.0]
    assert rendered["logprobs"]["top_logprobs"] == [
        {
            "bytes:\\xc3": -0.1,
            "bytes:\\xa9": -0.2,
            "token_id:300": -0.3,
            "token_id:301": -0.4,
            "<|end|>": -0.5,
            tokenizer.token_bytes(5).decode(): -9999.0,
        }
    ]


def test_each_choice_echoes_its_own_prompt(tokenizer: Tokenizer):
    body = completion(prompt=["ab", "cd"], n=2, echo=True, logprobs=None)
    renderer = CompletionRenderer(tokenizer, body)
    delta = Delta(parts=[Text("!")], first=True)
    texts = [part["text"] for i in range(4) for part in renderer.chunks(choice(tokenizer, "", i), delta)]
    assert texts == ["ab!", "ab!", "cd!", "cd!"]


def test_token_id_prompts_are_echoed_as_text(tokenizer: Tokenizer):
    body = completion(prompt=tokenizer.encode("né"), echo=True, logprobs=None)
    (part,) = CompletionRenderer(tokenizer, body).chunks(choice(tokenizer, "né"), Delta(first=True))
    assert part["text"] == "né"


def test_chat_carries_bytes(tokenizer: Tokenizer):
    body = parse(ChatBody, b'{"messages": [{"role": "user", "content": "a"}], "logprobs": true}')
    half = tokenizer.encode("é")[0]
    (rendered,) = ChatRenderer(tokenizer, body).chunks(
        choice(tokenizer, "a"), Delta(logprobs=[entry(half, top=[])])
    )
    (token,) = rendered["logprobs"]["content"]
    assert token == {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3], "top_logprobs": []}
