"""`turnout chat` as a user runs it: through a pipe, and in a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from turnout.commands.chat import Answer, Chat, Screen, run
from turnout.errors import UserError

GREEDY = {"max_tokens": 8, "temperature": 0}
FLAGS = ("--max-tokens", "8", "--temperature", "0")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "turnout.cli", "chat", *words]


def answered(base_url: str, messages: list[dict[str, str]]) -> str:
    reply = httpx.post(f"{base_url}/chat/completions", json={"messages": messages, **GREEDY}, timeout=60)
    return reply.json()["choices"][0]["message"]["content"]


def test_a_pipe_brings_messages_and_takes_answers(base_url: str):
    done = subprocess.run(
        command("--base-url", base_url, *FLAGS),
        input="hello\nand now?\n/exit\nno more\n",
        capture_output=True,
        text=True,
    )
    messages = [{"role": "user", "content": "hello"}]
    first = answered(base_url, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and now?"}]
    second = answered(base_url, messages)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(text if text.endswith("\n") else text + "\n" for text in (first, second))


@pytest.mark.parametrize(
    ("settings", "lines", "message"),
    [
        ({}, "", "standard input is empty"),
        ({}, "/nothing\n", "/nothing: no such command"),
        ({}, "caf\udce9\n", "must be UTF-8"),
        ({"max_tokens": 9999}, "hello\n", "the context holds"),
    ],
)
def test_what_cannot_be_done_ends_a_pipe_with_the_reason(
    base_url: str, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], lines: str, message: str
):
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    with pytest.raises(UserError) as caught:
        run(None, base_url=base_url, api_key="", system="", settings=settings)
    assert message in str(caught.value)


def test_there_must_be_a_server():
    with pytest.raises(UserError, match="no OpenAI-compatible server answers"):
        run(None, base_url="http://127.0.0.1:9/v1", api_key="", system="", settings={})
    with pytest.raises(UserError, match=r"--base-url http://\[::1: .*; such as http"):
        run(None, base_url="http://[::1", api_key="", system="", settings={})
    with pytest.raises(UserError, match="either MODEL or --base-url"):
        run(None, base_url="", api_key="", system="", settings={})


class Terminal:
    """A process in a terminal of its own, and what it has shown."""

    def __init__(self, words: list[str]):
        def prepare() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is for this process
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # which what runs tests may ignore

        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            words,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=prepare,
            env=os.environ | {"TERM": "xterm"},
        )
        os.close(slave)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str, seconds: float = 90) -> str:
        """What is shown up to the first match, which is then forgotten."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self._shown)):
            assert select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0], self._shown
            try:
                self._shown += os.read(self._master, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended after {self._shown!r}") from None
        shown, self._shown = self._shown[: match.end()], self._shown[match.end() :]
        return shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    shown = Terminal(command(*words))
    try:
        yield shown
    finally:
        shown.close()


def test_a_terminal_shows_answers_speed_and_commands(base_url: str, tmp_path: Path):
    with terminal("--base-url", base_url, "--system", "be brief", *FLAGS) as screen:
        screen.until(r"/help lists commands")
        screen.until("> ")
        screen.type("/help\n")
        assert "/retry" in screen.until(r"/exit")
        screen.type("hello\n")
        assert "\x1b[2m" in screen.until(r"\[8 tokens, \d+ tokens/s, cut at max_tokens\]")
        screen.type("/set max_tokens 3\n/retry\n")
        screen.until(r"\[3 tokens")
        screen.type("/set n 2\n")
        screen.until("chat needs its own")
        screen.type("two \\\nlines\n")
        screen.until(r"\[3 tokens")
        screen.type(f"/save {tmp_path / 'talk.json'}\n/undo\n/undo\n/undo\n")
        screen.until("no message to take back")
        screen.type("/exit\n")
        assert screen.process.wait(30) == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert saved[3]["content"] == "two \nlines"


@pytest.mark.more
def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_the_server_of_its_own(tiny_folder: Path):
    with terminal(
        str(tiny_folder), "--device", "cpu", "--max-total-tokens", "1024", "--num-threads", "1"
    ) as screen:
        screen.until(r"/help lists commands")
        (server,) = psutil.Process(screen.process.pid).children()
        screen.until("> ")
        screen.type("/set ignore_eos true\n")
        screen.until("> ")
        screen.type("hello\n")
        # Into the answer: readline's escapes come first, and Ctrl-C is readline's until it is done.
        screen.until(r"hello\r\n(?:\x1b\[[?\d]*[a-zA-Z]|\r)*[^\x1b\r]")
        screen.type("\x03")
        screen.until(r"\[stopped\]")
        screen.type("/set max_tokens 2\nstill there?\n")
        screen.until(r"\[2 tokens")
        screen.until("> ")
        screen.type("\x04")
        assert screen.process.wait(60) == 0
        assert not server.is_running()


class Events(httpx.BaseTransport):
    """A server that streams what it is told to; for what the tiny model does not say."""

    def __init__(self, events: list[dict[str, Any]]):
        self.events = events
        self.asked: list[dict[str, Any]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(json.loads(request.content))
        lines = [
            ": waiting",
            "",
            *(f"data: {json.dumps(event)}\n" for event in self.events),
            "data: [DONE]\n",
        ]
        return httpx.Response(200, text="\n".join(lines))


def said(
    capsys: pytest.CaptureFixture[str], events: list[dict[str, Any]], *, interactive: bool
) -> tuple[Chat, str]:
    client = httpx.Client(transport=Events(events), base_url="http://server/v1")
    chat = Chat(client, "model", settings={}, screen=Screen(sys.stdout, interactive))
    chat.take("question")
    return chat, capsys.readouterr().out


def part(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def test_reasoning_is_dimmed_and_calls_are_shown(capsys: pytest.CaptureFixture[str]):
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a": '}}
    events = [
        part(role="assistant", content=""),
        part(reasoning_content="let me "),
        part(reasoning_content="see"),
        part(content="I add."),
        part(tool_calls=[call]),
        part(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"completion_tokens": 12}},
    ]
    chat, shown = said(capsys, events, interactive=True)
    assert shown.startswith('\x1b[2mlet me see\n\n\x1b[0mI add.\n-> add({"a": 1})\n\x1b[2m[12 tokens, ')
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert said(capsys, events, interactive=False)[1] == 'I add.\n-> add({"a": 1})\n'


def test_an_answer_that_fails_midway_leaves_the_conversation_as_it_was(capsys: pytest.CaptureFixture[str]):
    chat, _ = said(capsys, [part("stop", content="fine")], interactive=False)
    before = list(chat.messages)
    for end, why in (
        ([{"error": {"message": "the engine failed"}}], "the engine failed"),
        ([{"error": "as text"}], "as text"),
        ([], "the answer broke off"),
    ):
        answer_with(chat, part(content="hal"), *end)
        with pytest.raises(UserError, match=why):
            chat.take("more")
        assert chat.messages == before
        assert capsys.readouterr().out == "hal\n"


def answer_with(chat: Chat, *events: dict[str, Any]) -> Events:
    server = Events(list(events))
    chat._client = httpx.Client(transport=server, base_url="http://server/v1")
    return server


def test_results_of_calls_go_back_to_the_model(capsys: pytest.CaptureFixture[str]):
    calls = [
        {"index": i, "id": f"c{i}", "function": {"name": "add", "arguments": f'{{"a": {i}}}'}} for i in (0, 1)
    ]
    asks = [part(reasoning_content="two sums"), part(tool_calls=calls), part("tool_calls")]
    chat, _ = said(capsys, asks, interactive=False)
    server = answer_with(chat, part("stop", content="1 and 2"))
    with pytest.raises(UserError, match="TEXT is missing"):
        chat.take("/result")
    chat.take("/result 1")
    assert not server.asked
    chat.take("/result 2")
    _, told, *results = server.asked[0]["messages"]
    assert (told["reasoning_content"], [call["id"] for call in told["tool_calls"]]) == (
        "two sums",
        ["c0", "c1"],
    )
    assert results == [
        {"role": "tool", "tool_call_id": "c0", "content": "1"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    with pytest.raises(UserError, match="no call waits"):
        chat.take("/result 3")
    capsys.readouterr()
    chat.take("/history")
    assert capsys.readouterr().out.splitlines() == [
        "user: question",
        'assistant: -> add({"a": 0}); -> add({"a": 1})',
        "tool: 1",
        "tool: 2",
        "assistant: 1 and 2",
    ]
    chat.take("/undo")
    assert not chat.messages


@pytest.mark.parametrize("shown", ["I add.", ""])
def test_ctrl_c_keeps_the_words_and_no_half_a_call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shown: str
):
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a": '}}
    chat = Chat(httpx.Client(), "model", settings={}, screen=Screen(sys.stdout, True))

    def events(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        yield from ([part(content=shown)] if shown else [])
        yield part(tool_calls=[call])
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_events", events)
    chat.take("question")
    assert "[stopped]" in capsys.readouterr().out
    assert [message["content"] for message in chat.messages] == (["question", shown] if shown else [])
    assert not any("tool_calls" in message for message in chat.messages)
    chat._screen.interactive = False
    with pytest.raises(KeyboardInterrupt):
        chat.take("question")


class Guarded(BaseHTTPRequestHandler):
    """Wants a key, and ends in the middle of every answer."""

    def do_GET(self) -> None:
        known = self.headers["authorization"] == "Bearer s3cret"
        self.reply(
            200 if known else 401,
            {"data": [{"id": "model"}]} if known else {"error": {"message": "wrong API key"}},
        )

    def do_POST(self) -> None:
        assert self.headers["authorization"] == "Bearer s3cret"
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(part(content='hal'))}\n\n".encode())

    def reply(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def guarded() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_key_from_the_environment_and_a_server_that_goes(guarded: str):
    done = subprocess.run(
        command("--base-url", guarded),
        input="hello\n",
        capture_output=True,
        text=True,
        env=os.environ | {"TURNOUT_API_KEY": "s3cret"},
    )
    assert (done.returncode, done.stdout) == (2, "hal\n")
    assert done.stderr.startswith(f"error: {guarded}/: peer closed connection")
    with pytest.raises(UserError, match=r"HTTP 401: wrong API key\); check --base-url"):
        run(None, base_url=guarded, api_key="wrong", system="", settings={})


def test_a_summary_says_how_an_answer_ended():
    assert Answer(tokens=1, finish_reason="stop").summary() == "[1 token]"
    assert Answer(tokens=5, began=1.0, ended=3.0, finish_reason="length").summary() == (
        "[5 tokens, 2 tokens/s, cut at max_tokens]"
    )
    assert Answer(text="so far").summary() == "[stopped]"
