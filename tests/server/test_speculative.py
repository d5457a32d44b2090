"""A server that decodes speculatively sends what the shared one sends, several tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import tiny_config
from turnout.server.launch import launch

PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module")
def drafting(tiny_folder: Path) -> Iterator[str]:
    config = tiny_config(tiny_folder, speculative_algorithm="ngram", speculative_num_draft_tokens=6)
    with launch(config, show=False) as url:
        yield url


def streamed(base_url: str, **fields: Any) -> tuple[str, str | None, int, list[str], int]:
    """(text, finish_reason, completion tokens, tokens with logprobs, events) of a streamed completion."""
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    text, reason, usage, tokens, events = "", None, 0, [], 0
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 80, **fields}
    for event in client.completions.create(stream=True, stream_options={"include_usage": True}, **body):
        events += 1
        usage = event.usage.completion_tokens if event.usage else usage
        for choice in event.choices:
            text += choice.text
            reason = choice.finish_reason or reason
            tokens += choice.logprobs.tokens if choice.logprobs else []
    return text, reason, usage, tokens, events


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "extra_body": {"ignore_eos": True}},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.4, "seed": 7, "extra_body": {"ignore_eos": True}},
        {"temperature": 0, "frequency_penalty": 0.5},
    ],
)
def test_a_stream_is_the_same(base_url: str, drafting: str, fields: dict[str, Any]):
    assert streamed(drafting, **fields)[:-1] == streamed(base_url, **fields)[:-1]


def test_a_stop_string_cuts_between_tokens_of_one_step(base_url: str, drafting: str):
    text = streamed(base_url, temperature=0)[0]
    for at in range(8, min(len(text), 40), 3):
        fields = {"temperature": 0, "stop": [text[at : at + 2]]}
        expected = streamed(base_url, **fields)
        assert expected[1] == "stop"
        assert streamed(drafting, **fields)[:-1] == expected[:-1]


def values(base_url: str) -> dict[str, float]:
    text = httpx.get(base_url.removesuffix("/v1") + "/metrics", timeout=60).text
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_drafts_are_counted_and_each_token_has_its_latency(drafting: str):
    before = values(drafting)
    *_, events = streamed(drafting, temperature=0, extra_body={"ignore_eos": True})
    after = values(drafting)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["turnout:generation_tokens_total"] == 80
    assert gained["turnout:inter_token_latency_seconds_count"] == 79
    drafted, accepted = (gained[f"turnout:spec_{kind}_tokens_total"] for kind in ("draft", "accepted"))
    assert accepted < drafted or drafted == 0  # they may rest by now, for a busy machine's times
    assert gained["turnout:steps_total"] == 80 - accepted
    assert events < 80 or accepted == 0
    assert 0 < after["turnout:spec_accepted_tokens_total"] < after["turnout:spec_draft_tokens_total"]
    (rank,) = httpx.get(drafting.removesuffix("/v1") + "/server_info", timeout=60).json()["ranks"]
    assert rank["spec_accepted_tokens"] == after["turnout:spec_accepted_tokens_total"]
