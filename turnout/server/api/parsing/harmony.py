"""Answers of GPT-OSS: messages in channels, each with a header and an end.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Tokens that end an answer (<|return|>, <|call|>) do not reach the parser.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from turnout.server.api.parsing.calls import json_call
from turnout.server.api.parsing.marks import undecided
from turnout.server.api.parsing.parts import Part, Reasoning, Text
from turnout.server.api.parsing.streamed import StreamedCall

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
BEGINS, ENDS = (MESSAGE,), ("<|end|>", "<|call|>", "<|return|>")
TOKENS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
# What grammars make answers of.
WRITTEN = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
THOUGHT = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTION = "functions."
_TO_BODY = re.compile(re.escape(MESSAGE))
_TO_END = re.compile("|".join(map(re.escape, ENDS)))


class HarmonyParser:
    """What is neither reasoning, text nor the call of a function comes back as the text it was; so does what
    is not asked for."""

    def __init__(
        self, *, reasoning: bool, calls: bool, opening: str = "", streamed_functions: Collection[str] = ()
    ):
        """opening: the part of the answer that the prompt holds, from behind `<|start|>assistant`.
        streamed_functions: those whose arguments are handed out as `StreamedCall` does."""
        self._reasoning, self._calls = reasoning, calls
        self._held = ""  # may be the beginning of a mark
        self._header: list[str] | None = []  # None within a message
        self._raw_header = ""
        self._kind: type[Text] | type[Reasoning] | str | None = None  # a str: the function that is called
        self._body: list[str] = []
        self._streamed: StreamedCall | None = None  # the present call
        self._streamed_functions = streamed_functions
        self.push(opening)

    @property
    def in_reasoning(self) -> bool:
        return self._header is None and self._kind is Reasoning

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        text, at = self._held + text, 0
        while (found := (_TO_END if self._header is None else _TO_BODY).search(text, at)) is not None:
            self._take(text[at : found.start()], parts)
            at = found.end()
            if self._header is not None:
                self._open(found[0])
            else:
                self._close(found[0], parts, ended=True)
        held = undecided(text, at, BEGINS if self._header is not None else ENDS)
        self._take(text[at : len(text) - held], parts)
        self._held = text[len(text) - held :]
        return parts

    def finish(self, *, cut: bool) -> list[Part]:
        parts: list[Part] = []
        self._take(self._held, parts)
        self._held = ""
        if self._header is None:
            self._close("", parts, ended=not cut)
        elif header := "".join(self._header).removeprefix(f"{START}assistant").strip():
            parts.append(Text(header))
        return parts

    def _take(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._header is not None:
            self._header.append(text)
        elif self._kind in (Text, Reasoning):
            parts.append(self._kind(text))
        else:
            self._body.append(text)
            if self._streamed is not None:
                parts += self._streamed.push(text)

    def _open(self, mark: str) -> None:
        assert self._header is not None
        header = "".join(self._header)
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._raw_header, self._header, self._body = header + mark, None, []
        if recipient is not None:
            is_function = recipient[1].startswith(_FUNCTION) and len(recipient[1]) > len(_FUNCTION)
            self._kind = recipient[1].removeprefix(_FUNCTION) if is_function and self._calls else None
        elif channel is not None and channel[1] == "analysis":
            self._kind = Reasoning if self._reasoning else None
        else:
            self._kind = Text if channel is None or channel[1] in ("final", "commentary") else None

        called = self._kind if isinstance(self._kind, str) else ""
        self._streamed = StreamedCall(None, [called]) if called in self._streamed_functions else None

    def _close(self, mark: str, parts: list[Part], *, ended: bool) -> None:
        body = "".join(self._body)
        self._header = []
        call = json_call(self._kind, body.strip()) if isinstance(self._kind, str) else None
        if self._streamed is not None and self._streamed.begun:
            parts += self._streamed.finish(call, ended=ended)
        elif call is not None:
            parts.append(call)
        elif self._kind not in (Text, Reasoning):
            parts.append(Text(self._raw_header + body + mark))
