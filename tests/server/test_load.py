"""Many clients at once, of which some leave without a word."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx

CLIENTS = 64
LEAVING = set(range(0, CLIENTS, 3))  # a third, spread over the queue
TOKENS = 24
ABANDONED = 200  # tokens that a client asks for who leaves after a few: any engine hears of it midway


def body(client: int, stream: bool) -> dict[str, Any]:
    """Prompts of many lengths, greedy and seeded sampling mixed."""
    return {
        "model": "tiny",
        "prompt": f"client {client} says " + "la " * (client % 7),
        "max_tokens": ABANDONED if client in LEAVING else TOKENS,
        "temperature": 0 if client % 2 else 1.0,
        "seed": client,
        "ignore_eos": True,
        "logprobs": 0,  # makes every token an event, also those without text
        "stream": stream,
    }


async def converse(http: httpx.AsyncClient, client: int) -> str:
    """The whole streamed text, or what came before this client hung up midway."""
    text, events = "", 0
    async with http.stream("POST", "/v1/completions", json=body(client, stream=True)) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return text
            text += json.loads(line[6:])["choices"][0]["text"]
            events += 1
            if client in LEAVING and events > 1 + client % 11:
                return text
    raise AssertionError(f"the stream of client {client} ended without [DONE]")


async def alone(http: httpx.AsyncClient, client: int) -> str:
    reply = await http.post("/v1/completions", json=body(client, stream=False))
    return reply.json()["choices"][0]["text"]


async def everyone(root: str) -> tuple[list[str], dict[int, str]]:
    """All texts when all ask together, then those of the clients who stay when each asks alone."""
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=root, timeout=120, limits=limits) as http:
        together = await asyncio.gather(*(converse(http, client) for client in range(CLIENTS)))
        staying = [client for client in range(CLIENTS) if client not in LEAVING]
        return together, {client: await alone(http, client) for client in staying}


def rank(http: httpx.Client) -> dict[str, Any]:
    info = http.get("/server_info").json()
    return info["ranks"][0] | info["requests"]


def settled(http: httpx.Client, seconds: float = 60) -> dict[str, Any]:
    """The counters, once nothing runs any more; as they are when `seconds` have passed."""
    deadline = time.monotonic() + seconds
    while (found := rank(http)) and time.monotonic() < deadline:
        if not (found["num_running"] or found["num_waiting"] or found["active"]):
            break
        time.sleep(0.05)
    return found


def test_leaving_clients_leak_nothing_and_disturb_nobody(root: str, http: httpx.Client):
    before = settled(http)
    together, one_by_one = asyncio.run(everyone(root))
    assert {client: together[client] for client in one_by_one} == one_by_one
    after = settled(http)
    assert after["pages_used"] == before["pages_used"] == 0
    assert after["num_running"] == after["num_waiting"] == 0
    assert after["active"] == after["sequences"] == 0
    generated = after["generation_tokens"] - before["generation_tokens"]
    complete = 2 * len(one_by_one) * TOKENS
    assert complete + 2 * len(LEAVING) <= generated < complete + len(LEAVING) * ABANDONED


def test_hanging_up_frees_the_slot_at_once(root: str, http: httpx.Client):
    """Without tokens on their way: a client that waits for a whole answer, and one that is queued."""
    settled(http)
    long = body(0, stream=False) | {"max_tokens": 450, "n": 64}  # four times 450 steps, for 17 have pages
    with httpx.Client(base_url=root, timeout=httpx.Timeout(10, read=0.1)) as impatient:
        steps = rank(http)["steps"]
        try:
            impatient.post("/v1/completions", json=long)
            raise AssertionError("64 times 450 tokens in 0.1 seconds: the test needs a longer request")
        except httpx.ReadTimeout:
            pass
    after = settled(http)
    assert after["num_running"] == after["active"] == after["pages_used"] == 0
    assert after["steps"] - steps < 3 * 450
