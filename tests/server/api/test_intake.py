"""Hostile requests: large bodies made to be slow, clients that are slow themselves, and those that vanish."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import io
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tests.server.processes import eventually
from tests.tiny import write_tokenizer
from turnout.config import ServerConfig
from turnout.engine.tokenizer import Tokenizer
from turnout.server.api import connection, guard, intake, large_bodies
from turnout.server.api.app import handle_errors
from turnout.server.api.errors import ApiError
from turnout.server.api.intake import Intake, LargeBodies
from turnout.server.api.large_bodies import Start
from turnout.server.api.protocol import ChatBody, CompletionBody, DetokenizeBody, parse
from turnout.server.api.routes import Routes
from turnout.server.api.sizes import Limits

LIMITS = Limits(model="tiny", max_context=512, vocab_size=384)
MB = 2**20


def repeated(head: str, item: str, tail: str, size: int = 4 * MB - 100) -> bytes:
    """A body of `size` bytes at most."""
    count = (size - len(head) - len(tail)) // (len(item) + 1)
    return (head + ",".join([item] * count) + tail).encode()


FIELDS = ",".join(f'"{i}":0' for i in range(300_000))
HOSTILE = {
    "messages that are numbers": (ChatBody, repeated('{"messages":[', "0", "]}"), "2097"),
    "empty messages": (
        ChatBody,
        repeated('{"messages":[', "{}", "]}"),
        "messages take at least as many tokens",
    ),
    "parts": (
        ChatBody,
        repeated('{"messages":[{"role":"user","content":[', "0", "]}]}"),
        "messages.0.content: ",
    ),
    "fields": (ChatBody, f'{{"messages":[],{FIELDS}}}'.encode(), "at most 256 fields"),
    "fields of a message": (ChatBody, f'{{"messages":[{{{FIELDS}}}]}}'.encode(), "at most 256 fields"),
    "token ids": (CompletionBody, repeated('{"prompt":[', "7", "]}"), "but the prompt has 2097"),
    "lists": (CompletionBody, repeated('{"prompt":[', "[]", "]}"), "at most 2048 prompts"),
    "a list of token ids among others": (
        CompletionBody,
        repeated('{"prompt":[[1],[', "7", "]]}"),
        "but the prompt has 2097",
    ),
    "texts": (CompletionBody, repeated('{"prompt":[', '""', "]}"), "at most 2048 prompts"),
    "stop ids": (
        CompletionBody,
        repeated('{"prompt":"a","stop_token_ids":[', '""', "]}"),
        "stop_token_ids: ",
    ),
    "stop strings": (CompletionBody, repeated('{"prompt":"a","stop":[', "0", "]}"), "at most 64 strings"),
    "biases": (
        CompletionBody,
        f'{{"prompt":"a","logit_bias":{{{FIELDS}}}}}'.encode(),
        "logit_bias: 300000 are too many",
    ),
    "tokens": (DetokenizeBody, repeated('{"tokens":[', '""', "]}"), "tokens.0: "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_fit_is_refused_without_a_look_at_its_elements(name: str):
    cls, raw, message = HOSTILE[name]
    gc.disable()  # as in the process of large bodies
    try:
        start = time.process_time()
        with pytest.raises(ApiError) as caught:
            parse(cls, raw, LIMITS)
    finally:
        gc.enable()
    assert time.process_time() - start < 1.5  # 7 to 34 s, where every element was looked at
    assert message in caught.value.message
    assert len(caught.value.message) < 300


def test_of_a_list_only_the_first_wrong_element_is_named():
    with pytest.raises(ApiError) as caught:
        parse(ChatBody, b'{"messages":[0,0,0],"n":0}', LIMITS)
    assert caught.value.message.count("messages.") == 1
    assert "n: Input should be greater" in caught.value.message


class Health(threading.Thread):
    """Asks for /health all the time, on one connection; the longest answer took `longest` seconds."""

    def __init__(self, root: str):
        super().__init__(daemon=True)
        self.root, self.longest, self.count = root, 0.0, 0
        self.stopped = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self.root, timeout=60) as http:
            while not self.stopped.wait(0.01):
                start = time.perf_counter()
                assert http.get("/health").status_code == 200
                self.longest = max(self.longest, time.perf_counter() - start)
                self.count += 1

    def __enter__(self) -> Health:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopped.set()
        self.join()


TEXT = json.dumps({"prompt": "the quick brown fox " * 200_000, "max_tokens": 1}).encode()
REQUESTS = [
    ("/v1/chat/completions", HOSTILE["messages that are numbers"][1], "context_length_exceeded"),
    ("/v1/completions", TEXT, "context_length_exceeded"),
    ("/tokenize", TEXT.replace(b', "max_tokens": 1', b""), "context_length_exceeded"),
    ("/v1/chat/completions", HOSTILE["parts"][1], None),
]


def test_large_requests_delay_nobody_and_leave_no_memory_behind(root: str, http: httpx.Client):
    server = psutil.Process(http.get("/server_info").json()["pid"])

    def send(request: tuple[str, bytes, str | None]) -> tuple[int, Any]:
        path, content, _ = request
        reply = httpx.post(root + path, content=content, timeout=60)
        return reply.status_code, reply.json()["error"]["code"]

    before = server.memory_info().rss
    with Health(root) as health, ThreadPoolExecutor(8) as clients:
        found = list(clients.map(send, REQUESTS * 4))
        while health.count <= 20 and len(found) < 100 * len(REQUESTS):  # on a fast machine, or a busy one
            found += clients.map(send, REQUESTS * 4)
        peak = server.memory_info().rss
    assert found == [(400, code) for _, _, code in REQUESTS] * (len(found) // len(REQUESTS))
    assert health.count > 20
    # 12.8 s when bodies were parsed by it; a second or so on two cores that run other tests too
    assert health.longest < 8, "the server's loop was blocked"
    assert peak < before + 150 * MB
    assert server.memory_info().rss < before + 50 * MB


def test_a_large_request_that_fits_is_answered_like_a_small_one(http: httpx.Client):
    small = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
    large = small | {"metadata": {"note": "x" * 100_000}}
    texts = {http.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in (small, large)}
    assert len(texts) == 1
    padded = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "user": "x" * 100_000}
    assert http.post("/v1/chat/completions", json=padded).json()["usage"]["completion_tokens"] == 2
    scored = http.post("/v1/completions", json=large | {"echo": True, "max_tokens": 0, "logprobs": 0}).json()
    assert scored["choices"][0]["text"] == "hello"


def test_a_text_that_cannot_fit_is_refused_by_its_length(http: httpx.Client):
    error = http.post("/v1/completions", json={"prompt": "x" * 20_000}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    for number in ("512 tokens", "20000 bytes", "2858 at least", "at most 7 bytes"):  # <|pad|> is the longest
        assert number in error["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(guard, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.5)


@pytest.fixture
def small_server(folder: Path) -> Iterator[str]:
    """uvicorn as the server runs it, before nothing but an intake; its address."""
    routes = Routes()
    reads: list[Intake] = []

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        if not reads:
            reads.append(Intake(4 * MB))
            reads[0].open(Tokenizer.load(folder), LIMITS, ServerConfig(model=str(folder)))
        _, prompts = await reads[0].read(CompletionBody, request)
        return Response(json.dumps(prompts), media_type="application/json")

    @routes.get("/much")
    async def much(request: Request) -> Response:
        return Response(b"x" * 64 * MB)

    @routes.post("/unread")
    async def unread(request: Request) -> Response:
        return Response("never mind")

    app = Starlette(routes=routes.routes)
    handle_errors(app)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, http=guard.GuardedProtocol, log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)


def connect(root: str) -> socket.socket:
    address = urlsplit(root)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def until_closed(client: socket.socket) -> bytes:
    found = b""
    while piece := client.recv(1 << 16):
        found += piece
    return found


HEAD = b"POST /tokenize HTTP/1.1\r\nHost: a\r\n"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("before", [b"", b"POST /unread HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"])
def test_a_head_that_does_not_come_is_answered_408(small_server: str, before: bytes):
    with closing(connect(small_server)) as client:
        if before:
            client.sendall(before)
            answer = b""
            while not answer.endswith(b"never mind"):
                answer += client.recv(1 << 16)
        client.sendall(HEAD)
        start = time.monotonic()

        def trickle() -> None:
            for i in range(1200):  # 60 s
                try:
                    client.sendall(b"X-%d: a\r\n" % i)
                except OSError:
                    return
                time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        head, _, body = until_closed(client).partition(b"\r\n\r\n")
        assert time.monotonic() - start < 30  # what trickles in does not prolong it
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "did not arrive" in json.loads(body)["error"]["message"]


@pytest.mark.usefixtures("impatient")
def test_a_connection_that_says_nothing_is_closed_without_a_word(small_server: str):
    with closing(connect(small_server)) as client:
        assert until_closed(client) == b""


@pytest.mark.usefixtures("impatient")
def test_a_body_that_does_not_come_is_answered_408(small_server: str):
    with closing(connect(small_server)) as client:
        client.sendall(HEAD + b"Content-Length: 100000\r\n\r\n" + b'{"prompt":')
        answer = until_closed(client)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"came too slowly" in answer


@pytest.mark.usefixtures("impatient")
def test_a_body_that_nobody_reads_does_not_keep_the_connection(small_server: str):
    with closing(connect(small_server)) as client:
        client.sendall(b"POST /unread HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n{")
        assert until_closed(client).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("impatient")
def test_a_client_that_reads_no_answer_is_disconnected(small_server: str):
    with closing(connect(small_server)) as client:
        client.sendall(b"GET /much HTTP/1.1\r\nHost: a\r\n\r\n")
        client.recv(1, socket.MSG_PEEK)  # it answers
        own = client.getsockname()
        assert eventually(lambda: own not in [c.raddr for c in psutil.Process().net_connections("tcp")])
        assert len(until_closed(client)) < 64 * MB


def chunked(pieces: list[bytes]) -> bytes:
    lines = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
    return HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + b"".join(lines) + b"0\r\n\r\n"


def test_bodies_in_tiny_chunks_are_refused(small_server: str):
    body = json.dumps({"prompt": "abc", "user": "y" * 100_000}).encode()
    with closing(connect(small_server)) as client:
        client.sendall(chunked([body[i : i + 1] for i in range(len(body))]))
        head, _, content = until_closed(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "too many chunks" in json.loads(content)["error"]["message"]
    for size in (256, 50_000):
        with closing(connect(small_server)) as client:
            client.sendall(chunked([body[i : i + size] for i in range(0, len(body), size)]))
            assert until_closed(client).startswith(b"HTTP/1.1 200 ")


def test_what_is_not_http_is_answered_in_the_shape_of_errors(
    small_server: str, caplog: pytest.LogCaptureFixture
):
    with closing(connect(small_server)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nno colon\r\n\r\n")
        head, _, content = until_closed(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request")
        assert "illegal header line" in json.loads(content)["error"]["message"]
    assert not caplog.records  # a line for each would let anybody fill the disk


def test_a_connection_serves_many_requests(small_server: str, monkeypatch: pytest.MonkeyPatch):
    """Also after longer pauses than a head may take."""
    monkeypatch.setattr(guard, "REQUEST_SECONDS", 0.5)
    with httpx.Client(base_url=small_server, timeout=60) as http:
        for size in (10, 300, 60_000):
            body = {"prompt": "x" * 10, "user": "y" * size}
            assert len(http.post("/tokenize", json=body).json()[0]) == 10
            time.sleep(0.7)


def large(text: str) -> bytes:
    return json.dumps({"prompt": text, "user": "y" * 40_000}).encode()


def start_of(folder: Path) -> Start:
    return Start(folder=str(folder), trust_remote_code=False, model="tiny", max_context=512, vocab_size=384)


def test_answers_reach_who_asked_also_when_others_leave(folder: Path):
    async def scenario() -> None:
        bodies = LargeBodies(start_of(folder))
        leaving = [asyncio.create_task(bodies.prepare(CompletionBody, large("ab" * 200))) for _ in range(3)]
        await asyncio.sleep(0.01)
        staying = [asyncio.create_task(bodies.prepare(CompletionBody, large("c" * i))) for i in (1, 2, 3)]
        for task in leaving:
            task.cancel()
        answers = await asyncio.gather(*staying)
        assert [len(prompts[0]) for _, prompts in answers] == [1, 2, 3]
        await bodies.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_process_is_started_anew_when_it_dies(folder: Path):
    async def scenario() -> None:
        bodies = LargeBodies(start_of(folder))
        _, prompts = await bodies.prepare(CompletionBody, large("abc"))
        ids = [[7] * 500] * 2048
        process = bodies._process
        assert process is not None
        await bodies._warming  # which leaves a process that is there already
        assert bodies._process is process
        process.send_signal(signal.SIGSTOP)  # so that it has not answered when it dies
        task = asyncio.create_task(bodies.prepare(CompletionBody, json.dumps({"prompt": ids}).encode()))
        await asyncio.sleep(0.02)
        process.kill()
        with pytest.raises(ApiError, match="has died") as caught:
            await task
        assert caught.value.status == 503
        _, prompts = await bodies.prepare(CompletionBody, json.dumps({"prompt": ids}).encode())
        assert prompts == ids
        process = bodies._process
        assert process is not None
        await bodies.close()
        assert process.returncode is not None

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_process_ends_when_its_memory_has_grown(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_bodies, "MAX_GROWTH", -1)
    raw = large("abc")
    request = large_bodies.REQUEST.pack(0, len(raw)) + raw
    start = json.dumps(dataclasses.asdict(start_of(folder))).encode() + b"\n"
    answers = io.BytesIO()
    large_bodies.serve(io.BytesIO(start + 2 * request), answers)
    is_last, size = large_bodies.REPLY.unpack(answers.getvalue()[: large_bodies.REPLY.size])
    assert is_last
    assert len(answers.getvalue()) == large_bodies.REPLY.size + size  # the second body was left to the next


def test_only_so_many_large_bodies_are_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(intake, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(intake, "MAX_WAITING", 1)

    async def scenario() -> None:
        reader = Intake(intake.HELD // 2)
        async with reader._hold(), reader._hold():
            start = time.monotonic()
            answers = await asyncio.gather(*(hold(reader) for _ in range(3)), return_exceptions=True)
            assert [isinstance(a, ApiError) and a.status == 503 for a in answers] == [True] * 3
            assert 0.1 < time.monotonic() - start < 8  # of the 10 s that it is otherwise
        await hold(reader)

    async def hold(reader: Intake) -> None:
        async with reader._hold():
            pass

    asyncio.run(scenario())
