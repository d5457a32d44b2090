"""Whatever a client sends, it gets a clear 4xx in OpenAI's shape, and no other client notices."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serving import CONTEXT

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def refused(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.fixture(autouse=True)
def _server_unharmed(http: httpx.Client):
    yield
    reply = http.post(COMPLETIONS, json={"model": "tiny", "prompt": "still", "max_tokens": 2})
    assert reply.status_code == 200
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not valid JSON in UTF-8"),
        (b"[1, 2]", "object"),
        (b"[" * 200_000, "not valid JSON"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_what_is_not_json(http: httpx.Client, path: str, body: bytes, message: str):
    assert message in refused(http.post(path, content=body))["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt: required"),
        ({"prompt": ""}, "prompt: must not be empty"),
        ({"prompt": []}, "prompt: must be a string"),
        ({"prompt": [[]]}, "prompt: must not be empty"),
        ({"prompt": ["ok", ""]}, "prompt: must not be empty"),
        ({"prompt": [384]}, "token id 384 does not lie in [0, 384)"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: must be at least 1 unless echo is true"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
        ({"prompt": "a", "n": 129}, "n: Input should be less than or equal to 128"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"prompt": "a", "top_p": 2}, "top_p=2"),
        ({"prompt": "a", "nonsense": 1}, "nonsense: unknown field"),
        ({"prompt": "a", "stop": ""}, "must not contain an empty string"),
        ({"prompt": "a", "logprobs": 1000}, "logprobs: Input should be less than or equal to 20"),
    ],
)
def test_completions(http: httpx.Client, body: dict[str, Any], message: str):
    assert message in refused(http.post(COMPLETIONS, json=body))["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages: required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools.0.function: required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ],
)
def test_chat(http: httpx.Client, body: dict[str, Any], message: str):
    assert message in refused(http.post(CHAT, json=body))["message"]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [(CONTEXT, 1, "prompt"), (CONTEXT + 1, None, "prompt"), (100, CONTEXT - 99, "max_tokens")],
)
def test_context_overflow(http: httpx.Client, num_prompt: int, max_tokens: int | None, param: str):
    error = refused(http.post(COMPLETIONS, json={"prompt": [1] * num_prompt, "max_tokens": max_tokens}))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert f"{CONTEXT} tokens" in error["message"]


def test_the_whole_context_can_be_used(http: httpx.Client):
    body = {"prompt": [1] * (CONTEXT - 3), "max_tokens": 3, "ignore_eos": True}
    assert http.post(COMPLETIONS, json=body).json()["usage"]["total_tokens"] == CONTEXT


def chunks_of(size: int):
    for _ in range(size // 100_000):
        yield b"x" * 100_000


@pytest.mark.parametrize("content", [b"x" * 10_000_000, "chunked"])
def test_a_body_of_ten_megabytes(http: httpx.Client, content: Any):
    if content == "chunked":  # no length announced
        content = chunks_of(10_000_000)
    error = refused(http.post(COMPLETIONS, content=content), 413)
    assert "--max-request-bytes" in error["message"]
    assert error["code"] == "request_too_large"


def test_a_body_that_waits_for_permission_is_refused_before_it_is_sent(root: str):
    address = urlsplit(root)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\nExpect: 100-continue"
        connection.sendall(head.encode() + b"\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_unknown_routes_and_methods(http: httpx.Client):
    assert refused(http.get("/v2/models"), 404)["type"] == "not_found_error"
    for wrong in ("/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completion"):
        assert "did you mean /v1/chat/completions?" in refused(http.post(wrong, json={}), 404)["message"]
    for path, allowed in (
        (COMPLETIONS, {"POST"}),
        ("/health", {"GET", "HEAD"}),
        ("/v1/models", {"GET", "HEAD"}),
    ):
        reply = http.request("DELETE", path)
        refused(reply, 405)
        assert set(reply.headers["allow"].split(", ")) == allowed  # RFC 9110, 15.5.6


def test_whoever_may_read_may_ask_for_the_head(http: httpx.Client):
    for path in (
        "/health",
        "/ready",
        "/metrics",
        "/version",
        "/v1/models",
        "/v1/models/tiny",
        "/server_info",
    ):
        reply = http.head(path)
        assert (reply.status_code, reply.content) == (200, b"")


def test_a_minimum_that_no_token_may_reach(http: httpx.Client):
    body = {"prompt": "a", "max_tokens": 4, "min_tokens": 2, "stop_token_ids": list(range(384))}
    assert "min_tokens=2" in refused(http.post(COMPLETIONS, json=body))["message"]
    stream = http.post(COMPLETIONS, json=body | {"stream": True})
    assert "min_tokens=2" in json.loads(stream.text.removeprefix("data: "))["error"]["message"]


def test_a_broken_request_line(root: str):
    address = urlsplit(root)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(b"\x00\x01\x02 nonsense\r\n\r\n")
        assert b" 400 " in connection.recv(4096).split(b"\r\n")[0]


def test_more_sequences_than_are_ever_served(http: httpx.Client):
    body = {"prompt": ["a"] * 64, "n": 128, "max_tokens": 1}
    assert "at most" in refused(http.post(COMPLETIONS, json=body))["message"]


def test_refused_while_streaming_is_still_a_status(http: httpx.Client):
    refused(http.post(COMPLETIONS, json={"prompt": "a", "stream": True, "max_tokens": CONTEXT}))
