"""What routers and tools ask besides answers: load, model, scores, cache, request ids, priorities."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from turnout import __version__


def probabilities(reference: PreTrainedModel, ids: list[int], labels: list[int]) -> list[float]:
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0, -1].float()
    return logits.softmax(-1)[labels].tolist()


QUERY, ITEMS, LABELS = [40, 41, 42], [[50], [60, 61], [70, 71, 72]], [5, 9, 300]


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_the_models_probabilities(
    http: httpx.Client, reference: PreTrainedModel, item_first: bool
):
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, "item_first": item_first}
    answer = http.post("/v1/score", json=body).json()
    for item, found in zip(ITEMS, answer["scores"], strict=True):
        ids = item + QUERY if item_first else QUERY + item
        assert found == pytest.approx(probabilities(reference, ids, LABELS), rel=1e-3)
    assert answer["usage"]["prompt_tokens"] == 3 * 3 + 6
    among = http.post("/v1/score", json=body | {"apply_softmax": True}).json()["scores"]
    for plain, share in zip(answer["scores"], among, strict=True):
        assert share == pytest.approx([p / sum(plain) for p in plain])


def test_scores_of_texts_are_those_of_their_tokens(http: httpx.Client):
    ids = [
        http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in ("is it", " so", " not")
    ]
    labels = {"label_token_ids": LABELS}
    texts = http.post("/v1/score", json={"query": "is it", "items": [" so", " not"], **labels}).json()[
        "scores"
    ]
    of_ids = http.post("/v1/score", json={"query": ids[0], "items": ids[1:], **labels}).json()["scores"]
    for by_text, by_ids in zip(texts, of_ids, strict=True):
        assert by_text == pytest.approx(by_ids, rel=1e-4)
    (one,) = http.post("/v1/score", json={"query": "is it", "items": " so", **labels}).json()["scores"]
    assert one == pytest.approx(texts[0], rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"label_token_ids": []}, "label_token_ids: List should have at least 1 item"),
        ({"label_token_ids": [384]}, "label_token_ids: token id 384 does not lie in [0, 384)"),
        ({"query": "a"}, "query and items must both be texts, or both token ids"),
        ({"items": []}, "items: must be a string, a list of strings"),
        ({"items": ["a", [1]]}, "items: must be a string, a list of strings"),
        ({"items": [[1] * 600]}, "the context holds 512 tokens"),
        ({"query": 3}, "query: must be a string or a list of token ids"),
        ({"temperature": 1}, "temperature: unknown field"),
        ({"items": [[999]]}, "token id 999"),
    ],
)
def test_scores_that_cannot_be_had_are_refused(http: httpx.Client, fields: dict[str, Any], reason: str):
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | fields
    answer = http.post("/v1/score", json=body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_routers_learn_what_is_served(http: httpx.Client):
    info = http.get("/model_info").json()
    assert info == http.get("/get_model_info").json()
    assert (info["served_model_name"], info["is_generation"], info["vocab_size"]) == ("tiny", True, 384)
    assert info["max_context_length"] == 512
    assert info["eos_token_ids"] == [257]
    assert http.get("/version").json() == {"version": __version__}


def test_load_counts_requests_until_they_are_answered(http: httpx.Client):
    body = {"prompt": "go", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2}
    assert http.get("/load").json()["server_load"] == 0
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert http.get("/load").json()["server_load"] == 1
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert set(http.get("/load").json()) == {"server_load", "running", "waiting"}


def cached(http: httpx.Client, text: str, **fields: Any) -> int:
    answer = http.post("/v1/completions", json={"prompt": text, "max_tokens": 1, **fields})
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_salt_and_a_reset_separate_prefixes(http: httpx.Client):
    text = "a prefix that nothing else here begins with, of some pages"
    assert cached(http, text) == 0
    assert cached(http, text) == 48
    assert cached(http, text, cache_salt="mine") == 0
    assert cached(http, text, cache_salt="mine") == 48
    assert cached(http, text, cache_salt="yours") == 0
    for route in ("/reset_prefix_cache", "/flush_cache"):
        assert http.post(route).json() == {"status": "ok"}
        assert cached(http, text) == 0
        assert cached(http, text, cache_salt="mine") == 0
        assert cached(http, text) == 48


def test_request_ids_come_back(http: httpx.Client):
    body = {"prompt": "go", "max_tokens": 1}
    given = http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    assert given.json()["id"] == "mine-1"
    own = http.post("/v1/completions", json=body | {"rid": "field"}, headers={"X-Request-Id": "header"})
    assert (own.headers["x-request-id"], own.json()["id"]) == ("header", "field")
    made = http.get("/no/such/route")
    assert made.status_code == 404
    assert len(made.headers["x-request-id"]) == 32
    for unfit in ("a" * 300, "a b", ""):
        assert http.get("/health", headers={"X-Request-Id": unfit}).headers["x-request-id"] != unfit


def test_priorities_are_refused_where_they_do_not_count(http: httpx.Client):
    refused = http.post("/v1/completions", json={"prompt": "a", "priority": 1})
    assert refused.status_code == 400
    assert "--scheduling-policy priority" in refused.json()["error"]["message"]
    assert (
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "priority": 0}).status_code == 200
    )


def test_scores_of_all_tokens_add_up(http: httpx.Client):
    body = {"query": QUERY, "items": [[50]], "label_token_ids": list(range(384))}
    (scores,) = http.post("/v1/score", json=body).json()["scores"]
    assert math.isclose(sum(scores), 1, rel_tol=1e-4)
