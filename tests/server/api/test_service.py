"""A server with a key and short queues; and what the shared one says about itself."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.processes import await_reports, eventually
from tests.serving import tiny_config
from turnout import __version__
from turnout.server.launch import launch

KEY = "s3cret"


@pytest.fixture(scope="module")
def guarded(tiny_folder: Path) -> Iterator[str]:
    flags = {"max_running_requests": 2, "max_queued_requests": 2, "watchdog_timeout": 60.0}
    config = tiny_config(tiny_folder, api_key=KEY, **flags)
    with launch(config, show=False) as url:
        yield url


def test_the_key_guards_all_but_probes_and_metrics(guarded: str):
    root = guarded.removesuffix("/v1")
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(root + path, timeout=60).status_code == 200
    for path in ("/v1/models", "/version", "/server_info", "/openapi.json"):
        assert httpx.get(root + path, timeout=60).status_code == 401
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/restart"):
        for given in (None, KEY, "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer{KEY}", f"Bearer {KEY}é"):
            header = {} if given is None else {"Authorization": given.encode()}
            reply = httpx.post(root + path, json={"prompt": "a"}, headers=header, timeout=60)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=guarded, api_key="wrong", max_retries=0).models.list()
    client = openai.OpenAI(base_url=guarded, api_key=KEY, max_retries=0)
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1


def test_who_has_no_key_to_show_cannot_restart_ranks(http: httpx.Client):
    refused = http.post("/restart")
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
    assert "--api-key" in refused.json()["error"]["message"]
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_the_scheme_is_case_insensitive(guarded: str, scheme: str):
    """RFC 9110, 11.1 and 11.4: the scheme's case does not matter, and one or more spaces follow it."""
    header = {"Authorization": f"{scheme} {KEY}"}
    assert httpx.get(f"{guarded}/models", headers=header, timeout=60).status_code == 200


def test_the_key_is_shown_to_nobody(guarded: str):
    info = httpx.get(
        guarded.removesuffix("/v1") + "/server_info", headers={"Authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert info.json()["config"]["api_key"] == "***"
    assert KEY not in info.text
    server = psutil.Process(info.json()["pid"])
    for process in (server, *server.children()):
        assert KEY not in " ".join(process.cmdline())


def test_a_full_queue_answers_503_and_recovers(guarded: str):
    """The engine stands still until the queue is full, however fast it is."""
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "busy", "max_tokens": 100, "ignore_eos": True}
    info = httpx.get(guarded.removesuffix("/v1") + "/server_info", headers=headers, timeout=60).json()
    engine = psutil.Process(info["ranks"][0]["pid"])

    async def burst() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=guarded, headers=headers, timeout=60) as http:
            asked = [asyncio.create_task(http.post("/completions", json=body)) for _ in range(8)]
            for refused in itertools.islice(asyncio.as_completed(asked), 4):
                await refused
            engine.resume()
            return await asyncio.gather(*asked)

    engine.suspend()
    try:
        replies = asyncio.run(burst())
    finally:
        engine.resume()
    assert sorted(reply.status_code for reply in replies) == [200] * 4 + [503] * 4
    for reply in replies:
        if reply.status_code == 503:
            assert reply.json()["error"]["code"] == "queue_full"
            assert reply.headers["retry-after"] == "1"
    assert httpx.post(f"{guarded}/completions", json=body, headers=headers, timeout=60).status_code == 200


def expert_tokens(http: httpx.Client) -> dict[tuple[str, str], float]:
    """Tokens of each (layer, expert)."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    (family,) = [family for family in families if family.name == "turnout:expert_tokens"]
    return {(s.labels["layer"], s.labels["expert"]): s.value for s in family.samples}


def test_every_token_is_counted_at_its_experts(root: str, http: httpx.Client):
    """Each of 2 layers sends each computed token to 2 of 8 experts."""
    await_reports(root)
    before = expert_tokens(http)
    body = {"prompt": [7, 8, 9, 10, 11], "max_tokens": 4, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    due = 2 * 2 * (5 + 4 - 1)  # no query attends to the last token
    assert eventually(lambda: sum(expert_tokens(http).values()) >= sum(before.values()) + due)
    after = expert_tokens(http)
    assert set(after) == {(str(layer), str(expert)) for layer in range(2) for expert in range(8)}
    for layer in "01":
        gained = sum(after[layer, str(e)] - before[layer, str(e)] for e in range(8))
        assert gained == due / 2
    assert metrics(http)["turnout:dispatch_tokens_total"] == sum(after.values())


def metrics(http: httpx.Client) -> dict[str, float]:
    """Sums over labels of every sample."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_metrics_count_what_happened(http: httpx.Client):
    before = metrics(http)
    body = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 7, "n": 2, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    after = metrics(http)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["turnout:generation_tokens_total"] == 14
    assert gained["turnout:prompt_tokens_total"] == 10
    assert gained["turnout:request_success_total"] == 2
    assert gained["turnout:time_to_first_token_seconds_count"] == 2
    assert gained["turnout:inter_token_latency_seconds_count"] == 12
    assert gained["turnout:e2e_request_latency_seconds_count"] == 2
    assert (
        gained["turnout:e2e_request_latency_seconds_sum"] > gained["turnout:time_to_first_token_seconds_sum"]
    )
    assert after["turnout:num_requests_running"] == after["turnout:num_requests_waiting"] == 0
    assert after["turnout:kv_cache_usage_perc"] == 0
    assert "turnout:idle_steps_total" in after
    assert "turnout:dispatch_tokens_total" in after


def test_server_info(http: httpx.Client):
    info = http.get("/server_info").json()
    assert info["version"] == http.get("/version").json()["version"] == __version__
    assert info["state"] == "ready"
    assert info["config"]["max_total_tokens"] == 8192
    assert info["plan"]["prefill"]["runner"] == "numba"
    (rank,) = info["ranks"]
    assert (rank["rank"], rank["state"]) == (0, "idle")
    assert rank["pages_total"] * info["config"]["page_size"] == 8192
    before = rank["steps"]
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    assert http.get("/server_info").json()["ranks"][0]["steps"] >= before + 3


def test_the_http_process_has_no_torch_and_nobody_spins_when_idle(http: httpx.Client):
    info = http.get("/server_info").json()
    server, engine = psutil.Process(info["pid"]), psutil.Process(info["ranks"][0]["pid"])
    assert engine.parents()[1] == server
    assert not any("torch" in region.path for region in server.memory_maps())
    assert any("torch" in region.path for region in engine.memory_maps())

    def busy() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in (server, engine))

    start = busy()
    time.sleep(1.5)
    assert busy() - start < 0.3
    assert eventually(lambda: http.get("/server_info").json()["seconds_since_report"] < 1.5)


def test_tokenize_and_back(http: httpx.Client):
    text = "Señor 🍐 <|end|>"
    tokens = http.post("/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["tokens"][-1] == 257
    assert http.post("/detokenize", json={"tokens": tokens["tokens"][:-1]}).json()["prompt"] == "Señor 🍐 "
