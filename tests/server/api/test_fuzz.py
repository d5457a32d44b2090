"""Random bodies from values at the edges: every answer is 200 or 400, and nothing is left behind."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

VALUES: dict[str, list[Any]] = {
    "prompt": ["hi", "é", "x" * 300, [1, 2, 3], [[1], [2, 383]], ["a", "b"], [384], ""],
    "temperature": [None, 0, 1e-300, 1e-5, 1, 100, -1, 1e300],
    "top_p": [0, 1e-300, 0.5, 1],
    "top_k": [-2, -1, 0, 1, 5, 10**6, 10**30],
    "min_p": [0, 1e-300, 0.5, 1],
    "seed": [None, 0, -(2**63), 2**63 - 1, 2**63],
    "n": [1, 2, 3],
    "max_tokens": [None, 0, 1, 5, 10**30],
    "min_tokens": [0, 1, 5],
    "logit_bias": [{}, {"5": -100, "6": 100}, {"383": 1e-5}],
    "presence_penalty": [0, 2, -2],
    "frequency_penalty": [0, 2, -2],
    "repetition_penalty": [0, 1e-300, 0.01, 0.5, 1, 10],
    "logprobs": [None, 0, 1, 20, 21],
    "echo": [None, False, True],
    "stop": [None, "a", ["b", "\x00"]],
    "stop_token_ids": [None, [], [5]],
    "ignore_eos": [False, True],
    "stream": [False, True],
}


@pytest.mark.parametrize("seed", range(3))
def test_edges_in_any_combination(http: httpx.Client, seed: int):
    rng = random.Random(seed)
    statuses = set()
    for _ in range(40):
        names = rng.sample(sorted(VALUES), rng.randint(1, 8))
        body = {"prompt": "hi"} | {name: rng.choice(VALUES[name]) for name in names}
        reply = http.post("/v1/completions", json=body)
        assert reply.status_code in (200, 400), (body, reply.text)
        if reply.status_code == 200:
            assert '"error"' not in reply.text, (body, reply.text)
        statuses.add(reply.status_code)
    assert statuses == {200, 400}
    info = http.get("/server_info").json()
    assert info["ranks"][0]["pages_used"] == info["ranks"][0]["num_running"] == 0
    assert info["requests"] == {"active": 0, "sequences": 0}
