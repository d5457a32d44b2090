"""`turnout chat`: a conversation with a model, in a terminal or through a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from turnout.config import Config, ServerConfig
from turnout.errors import UserError
from turnout.evals.client import reason, served_model
from turnout.server.launch import launch

CONNECT_SECONDS = 10
HELP = """\
/help             this
/new              forget the conversation
/system TEXT      begin again with this system message; without TEXT: none
/undo             take back the last message and its answer
/retry            another answer to the last message
/history          the conversation so far
/set NAME VALUE   a field of requests, such as temperature 0.2 or tools [...]; null: the server's default
/result TEXT      what the first call without a result came to; after the last the model goes on
/save FILE        write the conversation as JSON
/exit             leave, as Ctrl-D does. Ctrl-C stops an answer.
A line that ends in \\ goes on in the next. A message that begins with / needs a space before it."""


def run(config: Config | None, *, base_url: str, api_key: str, system: str, settings: dict[str, Any]) -> int:
    """Talk to a server of our own with `config`, or to the one at `base_url`; the exit code.

    settings: fields of every request. Raises UserError.
    """
    if (config is None) == (not base_url):
        raise UserError("chat needs either MODEL or --base-url URL")
    try:
        httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise UserError(f"--base-url {base_url}: {error}; such as http://127.0.0.1:30000/v1") from None
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with contextlib.ExitStack() as stack:
        if config is not None:
            for number in (signal.SIGTERM, signal.SIGHUP):  # the server must not outlive us
                signal.signal(number, lambda *_: sys.exit(0))
            quiet = ServerConfig(**config.describe(), port=0, log_level="warning", shutdown_timeout=0.0)
            base_url = stack.enter_context(launch(quiet, show=interactive, own_group=True))
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        client = stack.enter_context(httpx.Client(base_url=base_url, headers=headers, timeout=timeout))
        chat = Chat(
            client,
            asyncio.run(_model_of(base_url, headers)),
            settings=settings,
            screen=Screen(sys.stdout, interactive),
        )
        chat.begin(system)
        return chat.talk() if interactive else chat.read(sys.stdin)


@dataclass
class Answer:
    """What came of one request. `failed`: why it could not be answered."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    began: float = 0.0  # time.perf_counter() of the first token
    ended: float = 0.0
    finish_reason: str | None = None
    failed: str = ""

    @property
    def stopped(self) -> bool:
        """Whether it was cut off by the user; its last call may then be half a one."""
        return self.finish_reason is None

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls and self.reasoning:  # which models go on with once they know what the calls came to
            message["reasoning_content"] = self.reasoning
        return message | ({"tool_calls": self.calls} if self.calls else {})

    def summary(self) -> str:
        """The number of tokens comes at the end, and is not known of an answer that was stopped."""
        if self.stopped:
            return "[stopped]"
        seconds = self.ended - self.began
        rate = f", {(self.tokens - 1) / seconds:.0f} tokens/s" if self.tokens > 1 and seconds else ""
        cut = ", cut at max_tokens" if self.finish_reason == "length" else ""
        return f"[{self.tokens} token{'s' * (self.tokens != 1)}{rate}{cut}]"


class Screen:
    """Where answers go. A terminal shows reasoning dimmed, calls and speed; a pipe gets the answers' text."""

    def __init__(self, out: IO[str], interactive: bool):
        self.interactive = interactive
        self._out, self._dimmed, self._at_start = out, False, True

    def write(self, text: str, *, dim: bool = False) -> None:
        if self.interactive and dim != self._dimmed:
            self._out.write("\x1b[2m" if dim else "\x1b[0m")
            self._dimmed = dim
        self._out.write(text)
        self._out.flush()
        self._at_start = text.endswith("\n") if text else self._at_start

    def line(self) -> None:
        """Go to the start of a line, and leave off dimming."""
        self.write("" if self._at_start else "\n")

    def aside(self, text: str) -> None:
        """What is not part of an answer."""
        if self.interactive:
            self.write(text, dim=True)

    def end(self, answer: Answer) -> None:
        self.line()
        for call in answer.calls:
            self.write(f"-> {written(call)}\n")
        self.aside(answer.summary() + "\n")
        self.line()


class Chat:
    """One conversation. `messages` are as the API takes them."""

    def __init__(self, client: httpx.Client, model: str, *, settings: dict[str, Any], screen: Screen):
        self.messages: list[dict[str, Any]] = []
        self._client, self._model, self._screen = client, model, screen
        self._settings = dict(settings)
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: screen.write(HELP + "\n"),
            "new": lambda _: self.begin(self._system),
            "system": self.begin,
            "undo": lambda _: self._undo(),
            "retry": lambda _: self._retry(),
            "history": lambda _: self._show(),
            "result": self._result,
            "set": self._set,
            "save": self._save,
        }

    def begin(self, system: str) -> None:
        """A new conversation, after a system message if there is one."""
        self._system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def talk(self) -> int:
        """With a person, until they leave."""
        import readline  # noqa: F401  (input() then edits lines and remembers them)

        self._screen.aside(f"{self._model}. /help lists commands.\n")
        self._screen.line()
        while True:
            try:
                line = _whole_line()
            except EOFError:
                self._screen.write("\n")
                return 0
            except KeyboardInterrupt:
                self._screen.write("\n")
                continue
            if line.strip() in ("/exit", "/quit"):
                return 0
            try:
                self.take(line)
            except UserError as error:
                self._screen.write(f"{error}\n")

    def read(self, lines: IO[str]) -> int:
        """Messages from a pipe, one a line; the exit code."""
        said = False
        try:
            for line in lines:
                if line.strip() in ("/exit", "/quit"):
                    break
                line.encode()  # fails on what Python smuggles through in some locales
                said = said or bool(line.strip())
                self.take(line.rstrip("\r\n"))
        except UnicodeError:
            raise UserError("chat: standard input must be UTF-8") from None
        if not said:
            raise UserError("chat: standard input is empty; write one message a line")
        return 0

    def take(self, line: str) -> None:
        """One line of input: a command, or a message. Raises UserError if it cannot be done."""
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            if name not in self._commands:
                raise UserError(
                    f"/{name}: no such command; /help lists them. "
                    "A message that begins with / needs a space before it"
                )
            self._commands[name](rest.strip())
        elif line.strip():
            self._answer([*self.messages, {"role": "user", "content": line}])

    def _answer(self, messages: list[dict[str, Any]]) -> None:
        """Go on with `messages` and what the model answers. Changes nothing if it says nothing, or fails:
        then raises UserError. Ctrl-C in a terminal keeps what was said until then, but for calls."""
        answer = Answer()
        try:
            for event in self._events(messages):
                self._add(answer, event)
            if answer.stopped and not answer.failed:
                answer.failed = f"{self._client.base_url}: the answer broke off"
        except KeyboardInterrupt:
            if not self._screen.interactive:
                raise
            answer.finish_reason, answer.calls = None, []
        except (httpx.HTTPError, ValueError) as error:
            answer.failed = f"{self._client.base_url}: {str(error) or type(error).__name__}"
        if answer.failed:
            self._screen.line()
            raise UserError(answer.failed)
        self._screen.end(answer)
        if answer.text or not answer.stopped:
            self.messages = [*messages, answer.message()]

    def _events(self, messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Of a streamed answer. Raises httpx.HTTPError, and ValueError for what is not JSON."""
        body = {
            "model": self._model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings,
        }
        with self._client.stream("POST", "chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                yield {"error": {"message": reason(response)}}
                return
            for line in response.iter_lines():
                name, _, data = line.partition(":")
                if name == "data" and data.strip() != "[DONE]":
                    yield json.loads(data)

    def _add(self, answer: Answer, event: dict[str, Any]) -> None:
        """Show and note what one event brings."""
        if error := event.get("error"):
            answer.failed = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            thought, text = delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")
            if thought:
                answer.reasoning += thought
                self._screen.aside(thought)
            if text:
                if answer.reasoning and not answer.text:
                    self._screen.aside("\n\n")
                answer.text += text
                self._screen.write(text)
            for call in delta.get("tool_calls") or ():
                _add_call(answer.calls, call)
            if thought or text or delta.get("tool_calls"):
                answer.began = answer.began or time.perf_counter()
                answer.ended = time.perf_counter()
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason

    def _undo(self) -> None:
        said = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not said:
            raise UserError("/undo: there is no message to take back")
        del self.messages[said[-1] :]

    def _retry(self) -> None:
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise UserError("/retry: there is no answer yet")
        self._answer(self.messages[:-1])

    def _show(self) -> None:
        for message in self.messages:
            calls = [f"-> {written(call)}" for call in message.get("tool_calls", ())]
            self._screen.write(
                f"{message['role']}: {'; '.join(filter(None, [message['content'], *calls]))}\n"
            )

    def _result(self, rest: str) -> None:
        known = {message.get("tool_call_id") for message in self.messages}
        spoken = [message for message in self.messages if message["role"] != "tool"]
        calls = spoken[-1].get("tool_calls", ()) if spoken else ()
        waiting = [call["id"] for call in calls if call["id"] not in known]
        if not waiting or not rest:
            raise UserError(f"/result TEXT: {'TEXT is missing' if waiting else 'no call waits for a result'}")
        messages = [*self.messages, {"role": "tool", "tool_call_id": waiting[0], "content": rest}]
        if len(waiting) > 1:
            self.messages = messages
        else:
            self._answer(messages)

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name or not value:
            raise UserError(
                f"/set NAME VALUE, as /set temperature 0.2; set now: {json.dumps(self._settings)}"
            )
        if name in ("messages", "stream", "stream_options", "n"):
            raise UserError(f"/set {name}: chat needs its own")
        try:
            self._settings[name] = json.loads(value)
        except ValueError:
            self._settings[name] = value

    def _save(self, rest: str) -> None:
        if not rest:
            raise UserError("/save FILE: FILE is missing")
        try:
            Path(rest).write_text(json.dumps(self.messages, indent=2, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            raise UserError(f"/save {rest}: cannot be written ({error.strerror})") from None


async def _model_of(base_url: str, headers: dict[str, str]) -> str:
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=CONNECT_SECONDS) as client:
        return await served_model(client)


def _whole_line() -> str:
    """A line of a terminal, with those it goes on in."""
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("  "))
    return "\n".join(lines)


def written(call: dict[str, Any]) -> str:
    """A call as a person reads it."""
    return f"{call['function']['name']}({call['function']['arguments']})"


def _add_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    """One piece of a streamed call: its place, and more of its name or arguments."""
    place = part.get("index", len(calls))
    while len(calls) <= place:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[place], part.get("function") or {}
    call["id"] = part.get("id") or call["id"]
    for name in ("name", "arguments"):
        call["function"][name] += function.get(name) or ""
