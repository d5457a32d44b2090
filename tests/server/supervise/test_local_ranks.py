"""A server of several ranks: its answers, and what becomes of requests and processes when ranks fail."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.processes import (
    Background,
    await_reports,
    eventually,
    folder_of,
    has_ended,
    is_ready,
    ranks_of,
    refusal,
    started,
)
from tests.serving import tiny_config
from turnout.parallel.health import Board
from turnout.server.launch import ServerProcess
from turnout.server.supervise.watchdog import SILENT_SECONDS

DP2_EP2 = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}
NOTICED = 20.0  # seconds; below one on a quiet machine, where tools.chaos measures it
RECOVERED = 60.0  # a few seconds on a quiet machine
PROMPTS = [f"{i} pears and {i * i} plums" * (1 + i % 3) for i in range(8)]

Served = tuple[ServerProcess, str]


@pytest.fixture(scope="module")
def two_ranks(tiny_folder: Path) -> Iterator[Served]:
    """One server for most tests here, since each leaves it as ready as it was."""
    with started(tiny_folder, **DP2_EP2, shutdown_timeout=120.0) as served:
        yield served


@pytest.fixture
def ready(two_ranks: Served) -> Iterator[Served]:
    server, root = two_ranks
    assert eventually(lambda: is_ready(root), RECOVERED)
    yield two_ranks
    assert server.process.poll() is None, server.last_lines()


def shared_memory() -> set[str]:
    """Of Turnout and torch: what else runs here has segments that come and go."""
    return {segment.name for name in ("turnout*", "torch*") for segment in Path("/dev/shm").glob(name)}


def weights_mapped(rank: psutil.Process) -> int:
    """Bytes of the memory for prepared weights that it has mapped; in how many pieces is up to the kernel."""
    maps = rank.memory_maps(grouped=False)
    return sum(mapped.size for mapped in maps if "turnout-weights" in mapped.path)


def complete(root: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True} | fields
    reply = httpx.post(f"{root}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def texts(root: str, prompts: list[str], **fields: Any) -> list[str]:
    """Of all prompts, asked for at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda prompt: complete(root, prompt, **fields), prompts)
        return [answer["choices"][0]["text"] for answer in answers]


def info(root: str) -> dict[str, Any]:
    return httpx.get(f"{root}/server_info", timeout=60).json()


def metric(root: str, name: str) -> dict[str, float]:
    """Values of a metric by its labels, leaving out the model's name, which all have."""
    lines = httpx.get(f"{root}/metrics", timeout=60).text.splitlines()
    values = (line.rpartition(" ") for line in lines if line.startswith(name))
    plain = (
        (labels.removeprefix(name).replace('model_name="tiny"', ""), value) for labels, _, value in values
    )
    return {labels.replace("{,", "{").replace("{}", ""): float(value) for labels, value in plain}


def streams(root: str) -> list[Background]:
    """One on each rank."""
    return [Background(root, tokens=480, prompt=prompt) for prompt in ("one", "another")]


def test_answers_are_those_of_one_rank(ready: Served, root: str):
    _, two = ready
    assert texts(two, PROMPTS) == texts(root, PROMPTS)


def test_all_choices_and_prompts_of_one_request(ready: Served, root: str):
    """They spread over the ranks and come back in order."""
    _, two = ready
    several = {"n": 2, "max_tokens": 6, "seed": 3, "temperature": 0.8}
    both = [
        httpx.post(f"{at}/v1/completions", json={"prompt": PROMPTS} | several, timeout=60)
        for at in (two, root)
    ]
    answers = [[choice["text"] for choice in reply.json()["choices"]] for reply in both]
    assert len(answers[0]) == 2 * len(PROMPTS)
    assert answers[0] == answers[1]


def test_every_rank_gets_work_and_says_so(ready: Served):
    _, root = ready
    before = metric(root, "turnout:generation_tokens_total")
    texts(root, PROMPTS)
    assert eventually(
        lambda: (
            sum(metric(root, "turnout:generation_tokens_total").values())
            == sum(before.values()) + 16 * len(PROMPTS)
        )
    )
    ranks = info(root)["ranks"]
    assert [(rank["rank"], rank["dp_rank"], rank["ep_rank"]) for rank in ranks] == [(0, 0, 0), (1, 1, 1)]
    assert all(rank["generation_tokens"] > 0 for rank in ranks)
    assert eventually(
        lambda: len({rank["steps"] for rank in info(root)["ranks"]}) == 1
    )  # all steps are common
    assert {rank["pid"] for rank in ranks} == {process.pid for process in ranks_of(ready[0])}
    assert set(metric(root, "turnout:idle_steps_total")) == {'{rank="0"}', '{rank="1"}'}


def test_threads_of_ranks_leave_their_cores_while_they_wait(ready: Served):
    for rank in ranks_of(ready[0]):
        assert rank.environ()["OMP_WAIT_POLICY"] == os.environ.get("OMP_WAIT_POLICY", "PASSIVE")


def test_experts_are_counted_once(ready: Served):
    """Two layers, two experts for each of the tokens that were computed."""
    _, root = ready

    def counted() -> tuple[float, float]:
        tokens = metric(root, "turnout:prompt_tokens_total"), metric(root, "turnout:generation_tokens_total")
        chosen = metric(root, "turnout:expert_tokens_total")
        return sum(sum(of.values()) for of in tokens), sum(chosen.values())

    await_reports(root, ranks=2)
    tokens, chosen = counted()
    complete(root, "x" * 50, max_tokens=11)
    assert eventually(lambda: counted()[0] == tokens + 61)
    computed = 50 + 11 - 1  # what follows the last token is not computed
    assert eventually(lambda: counted()[1] == chosen + 2 * 2 * computed), counted()


def test_a_request_starts_at_once_on_resting_ranks(ready: Served):
    """Unless woken they look around a second after the last step, so each request would take 0.7 s."""
    body, took = {"max_tokens": 1, "temperature": 0}, list[float]()

    def starts_at_once() -> bool:
        time.sleep(0.3)
        start = time.monotonic()
        reply = http.post("/v1/completions", json=body | {"prompt": f"wake {len(took)}"})
        took.append(time.monotonic() - start)
        assert reply.status_code == 200, reply.text
        return took[-1] < 0.5

    with httpx.Client(base_url=ready[1], timeout=60) as http:  # one: to make it takes long on a busy host
        assert eventually(starts_at_once), took


def whole(stream: Background) -> bool:
    """Whether it got all its tokens, and none twice."""
    return stream.num_tokens() == 480


def test_a_killed_rank_is_replaced_and_no_request_is_lost(ready: Served):
    """Neither those that run nor those that come meanwhile."""
    server, root = ready
    before, old, folder = shared_memory(), ranks_of(server), folder_of(server)
    restarts, prompts = info(root)["restarts"], metric(root, "turnout:resumed_requests_total")
    replayed = metric(root, "turnout:replayed_tokens_total")[""]
    mapped = weights_mapped(old[0])
    assert mapped > 0
    running = streams(root)
    old[0].kill()
    refused = refusal(root, NOTICED)
    with ThreadPoolExecutor() as pool:
        meanwhile = pool.submit(texts, root, PROMPTS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "restarting")
        assert "rank 0 was killed by SIGKILL" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        assert all(whole(stream) for stream in running)
        assert len(meanwhile.result()) == len(PROMPTS)
    assert eventually(lambda: is_ready(root), RECOVERED)
    assert eventually(lambda: all(has_ended(rank) for rank in old))
    assert all(weights_mapped(rank) == mapped for rank in ranks_of(server))
    assert not folder.exists()
    assert eventually(lambda: shared_memory() <= before)
    assert info(root)["restarts"] == restarts + 1
    assert metric(root, "turnout:resumed_requests_total")[""] == prompts[""] + len(running)
    delivered = len(running) * 480  # and prompts, of a few tokens; what they got before the kill is unknown
    assert 0 < metric(root, "turnout:replayed_tokens_total")[""] - replayed < delivered + 2 * 10


def test_kills_during_recovery_are_survived(ready: Served):
    server, root = ready
    first, running = ranks_of(server)[1], streams(root)
    first.kill()
    for _ in range(2):
        known = {process.pid for process in ranks_of(server)}
        assert eventually(lambda: len({p.pid for p in ranks_of(server)} - known) == 2, RECOVERED)  # noqa: B023
        ranks_of(server)[0].kill()
    assert all(whole(stream) for stream in running)


def test_a_stopped_rank_is_found_and_named(ready: Served):
    server, root = ready
    old = ranks_of(server)
    running = streams(root)
    old[1].suspend()
    refusal(root, SILENT_SECONDS + NOTICED)
    why = info(root)["last_failure"]
    assert re.search(r"rank 1 does not run: no heartbeat for \d+ s", why), why
    assert re.search(rf"on host {socket.gethostname()}, in phase \w+ of step \d+, while rank 0 was", why), why
    assert all(whole(stream) for stream in running)
    assert eventually(lambda: all(has_ended(rank) for rank in old))


def test_a_slow_rank_is_no_stalled_one(ready: Served):
    """It runs a third of the time, for longer than the deadline, and everyone's requests are answered."""
    server, root = ready
    restarts, slow = info(root)["restarts"], ranks_of(server)[1]
    running = streams(root)
    end = time.monotonic() + 2 * SILENT_SECONDS
    board = Board(folder_of(server) / "board", 2)
    while time.monotonic() < end:
        slow.suspend()
        time.sleep(0.6)
        beats = board.read(1).beats
        slow.resume()
        time.sleep(0.3)
        assert eventually(lambda: board.read(1).beats > beats)  # noqa: B023
    board.close()
    assert all(stream.result()[-1] == "[DONE]" for stream in running)
    assert info(root)["restarts"] == restarts


def test_a_long_rest_is_no_stall(ready: Served):
    _, root = ready
    restarts = info(root)["restarts"]
    time.sleep(SILENT_SECONDS + 1)
    complete(root, "after a rest")
    assert info(root)["restarts"] == restarts


def test_told_to_stop_the_server_owes_its_answers_even_if_a_rank_dies(two_ranks: Served):
    """The last test on the shared server. Requests finish, whichever rank has them, and all ranks leave."""
    server, root = two_ranks
    before, rank = shared_memory(), ranks_of(server)[0]
    running = streams(root)
    rank.suspend()  # so that they are not complete yet
    server.process.terminate()
    refusal(root, NOTICED)
    rank.kill()
    assert all(whole(stream) for stream in running)
    assert server.process.wait(60) == 0
    assert "the ranks are ready again, and 2 requests go on" in server.last_lines()
    assert eventually(lambda: shared_memory() <= before)


def test_ranks_that_share_requests_and_do_not_outlive_a_killed_server(tiny_folder: Path, root: str):
    before = shared_memory()
    with started(tiny_folder, tp_size=2) as (server, shared):
        ranks, folder = ranks_of(server), folder_of(server)
        assert texts(shared, PROMPTS) == texts(root, PROMPTS)
        streams(shared)
        server.process.kill()
        assert eventually(lambda: all(has_ended(rank) for rank in ranks))
        assert eventually(lambda: not folder.exists())
    assert eventually(lambda: shared_memory() <= before)


def test_starts_that_come_to_nothing_are_given_up(tiny_folder: Path):
    """Every rank is killed as soon as it shows."""
    server = ServerProcess(tiny_config(tiny_folder), show=False)
    try:
        seen: set[int] = set()
        while server.process.poll() is None:
            with suppress(psutil.NoSuchProcess):  # its parent knew of the end before us
                for process in psutil.Process(server.process.pid).children():
                    seen.add(process.pid)
                    process.kill()
            time.sleep(0.01)
        assert server.process.wait(60) == 1
        assert len(seen) in (5, 6)  # one that still imports, before a rank is needed, is replaced
        server.stop()
        assert "error: the engine process was killed by SIGKILL" in server.last_lines()
    finally:
        server.process.kill()
