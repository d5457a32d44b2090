"""Answers in which tags mark reasoning and calls: a parser that goes with the stream.

Why not transformers' `ResponseParser`: it keeps and copies the whole answer with every piece (3 us a piece at
10,000 characters, 16 us at 400,000), raises at a call that is not JSON and has lost its text then, and takes
1.5 s to import.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence

from turnout.server.api.parsing.calls import Schemas, read_call
from turnout.server.api.parsing.family import CallFormat, ReasoningMarks
from turnout.server.api.parsing.marks import either, undecided
from turnout.server.api.parsing.parts import Arguments, Call, Part, Reasoning, Text
from turnout.server.api.parsing.streamed import StreamedCall


class State(enum.Enum):
    TEXT = enum.auto()
    REASONING = enum.auto()
    SECTION = enum.auto()  # where calls stand, between two of them
    CALL = enum.auto()


class TaggedParser:
    """A call is handed out whole once it ends; what is not a call after all comes back as the text it was.
    With `streams_arguments`, calls whose arguments are JSON are handed out as `StreamedCall` does.

    Reasoning can only come first. White space around reasoning and before calls belongs to the format.
    """

    def __init__(
        self,
        reasoning: ReasoningMarks | None,
        calls: CallFormat | None,
        schemas: Schemas,
        *,
        opening: str = "",
        streams_arguments: bool = False,
    ):
        """None: not looked for, left in the text. opening: the part of the answer that the prompt holds."""
        self._streams_arguments = streams_arguments
        self._reasoning, self._calls, self._schemas = reasoning, calls, schemas
        self._held = ""  # may be the beginning of a mark
        self._space: list[str] = []  # white space that belongs to a mark if one follows
        self._raw: list[str] = []  # what has been read of a section or call that gave none so far
        self._body: list[str] = []  # of the present call
        self._streamed: StreamedCall | None = None  # the same call
        self._in_string = False  # of its JSON
        self._section_has_calls = False
        self._begun = False  # some text or call was handed out
        self._last: Part | None = None
        opens = reasoning is not None and opening.rfind(reasoning.open) > opening.rfind(reasoning.close)
        self._marks = {state: self._marks_in(state) for state in State}
        self._patterns = {state: either(marks) for state, marks in self._marks.items()}
        # What marks begin with, where most text has nothing to do with them.
        self._begins_in_text = _beginning(self._marks[State.TEXT])
        self._begins_in_reasoning = _beginning(self._marks[State.REASONING])
        self._state = State.REASONING if opens else State.TEXT
        closed = reasoning is not None and opening.rstrip().endswith(reasoning.close)
        self._strip_lines = opens or closed

    @property
    def in_reasoning(self) -> bool:
        return self._state is State.REASONING

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if not self._held and self._has_no_mark(text):  # as most of it
            self._take(text, parts)
            return parts
        text, at = self._held + text, 0
        while (found := self._next_mark(text, at)) is not None:
            self._take(text[at : found.start()], parts)
            at = found.end()
            self._on_mark(found[0], parts)
        held = self._undecided(text, at)
        self._take(text[at : len(text) - held], parts)
        self._held = text[len(text) - held :]
        return parts

    def finish(self, *, cut: bool) -> list[Part]:
        parts: list[Part] = []
        held, self._held = self._held, ""
        self._take(held, parts)
        if self._state is State.CALL:
            assert self._calls is not None
            whole = not cut or self._calls.parameter is None  # one JSON object shows whether it is whole
            self._end_call(parts, "", whole=whole, ended=not cut)
        if self._state is State.SECTION and not self._section_has_calls:
            self._say_raw(parts)
        if self._state is State.TEXT and not isinstance(self._last, (Call, Arguments)):
            self._add(Text("".join(self._space)), parts)
        return parts

    def _marks_in(self, state: State) -> list[str]:
        """What may end or interrupt a state."""
        first = [] if self._calls is None else [self._first_mark(self._calls)]
        match state, self._reasoning, self._calls:
            case State.TEXT, ReasoningMarks() as marks, _:
                return [marks.open, *first]
            case State.TEXT, None, _:
                return first
            case State.REASONING, ReasoningMarks() as marks, calls:
                return [marks.close, *(first if calls and calls.ends_reasoning else ())]
            case State.SECTION, _, CallFormat(section=(_, end)) as calls:
                return [calls.begin, end]
            case State.CALL, _, CallFormat() as calls:
                return [calls.end]
        return []

    @staticmethod
    def _first_mark(calls: CallFormat) -> str:
        return calls.section[0] if calls.section else calls.begin

    def _next_mark(self, text: str, at: int) -> re.Match[str] | None:
        pattern = self._patterns[self._state]
        if pattern is None:
            return None
        if self._state is State.CALL and self._calls is not None and self._calls.in_strings:
            for found in _in_json(self._calls.end).finditer(text, at):
                if found[0] == '"':
                    self._in_string = not self._in_string
                elif found[0][0] != "\\" and not self._in_string:
                    return found
            return None
        for found in pattern.finditer(text, at):
            opens_reasoning = self._reasoning is not None and found[0] == self._reasoning.open
            if not (opens_reasoning and (self._begun or text[at : found.start()].strip())):
                return found
        return None

    def _has_no_mark(self, text: str) -> bool:
        """Whether it surely holds no mark, nor the beginning of one."""
        if self._state is State.TEXT:
            beginning = self._begins_in_text
        elif self._state is State.REASONING:
            beginning = self._begins_in_reasoning
        else:
            return False
        return beginning is None or beginning.search(text) is None

    def _undecided(self, text: str, at: int) -> int:
        """Characters at the end of `text` that may be the beginning of a mark, or half an escape."""
        if begun := undecided(text, at, self._marks[self._state]):
            return begun
        backslashes = len(text) - max(at, len(text.rstrip("\\")))
        return backslashes % 2 if self._state is State.CALL else 0

    def _take(self, text: str, parts: list[Part]) -> None:
        """Text up to the next mark."""
        match self._state:
            case State.TEXT:
                self._say(text, parts)
            case State.REASONING:
                self._think(text, parts)
            case State.CALL:
                self._body.append(text)
                for part in self._streamed.push(text) if self._streamed else ():
                    self._add_call(part, parts)
            case State.SECTION:
                stray = text.rstrip()
                if stray:
                    self._raw.append(stray)
                    self._say_raw(parts)
                self._raw.append(text[len(stray) :])

    def _on_mark(self, mark: str, parts: list[Part]) -> None:
        reasoning, calls = self._reasoning, self._calls
        if self._state is State.CALL:
            self._end_call(parts, mark, whole=True, ended=True)
        elif reasoning and mark == reasoning.open:
            self._state, self._strip_lines = State.REASONING, True
            self._space.clear()
        elif reasoning and mark == reasoning.close:
            self._state, self._strip_lines = State.TEXT, True
            self._space.clear()
        elif calls and calls.section and mark == calls.section[1]:
            self._end_section(mark, parts)
        elif calls and calls.section and mark == calls.section[0]:
            self._raw = [*self._space, mark]
            self._space.clear()
            self._state, self._section_has_calls = State.SECTION, False
        else:
            self._raw += [*self._space, mark]
            self._space.clear()
            self._body, self._in_string = [], False
            self._streamed = StreamedCall(calls, self._schemas) if self._streams_arguments and calls else None
            self._state = State.CALL

    def _end_call(self, parts: list[Part], mark: str, *, whole: bool, ended: bool) -> None:
        assert self._calls is not None
        body = "".join(self._body)
        call = read_call(self._calls, body, self._schemas) if whole else None
        self._state = State.SECTION if self._calls.section else State.TEXT
        self._strip_lines = False
        if self._streamed is not None and self._streamed.begun:
            for part in self._streamed.finish(call, ended=ended):
                self._add_call(part, parts)
        elif call is not None:
            self._add_call(call, parts)
        else:
            self._raw += [body, mark]
            self._say_raw(parts)

    def _add_call(self, part: Part, parts: list[Part]) -> None:
        self._raw.clear()
        self._section_has_calls = True
        self._add(part, parts)

    def _end_section(self, mark: str, parts: list[Part]) -> None:
        self._state, self._strip_lines = State.TEXT, False
        if not self._section_has_calls:
            self._raw.append(mark)
            self._say_raw(parts)
        self._raw.clear()

    def _say_raw(self, parts: list[Part]) -> None:
        """What was read as a call is text."""
        self._add(Text("".join(self._raw)), parts)
        self._raw.clear()

    def _say(self, text: str, parts: list[Part]) -> None:
        text = self._without_first_lines(text)
        if self._calls is None:
            self._add(Text(text), parts)
        else:
            self._add_but_space(Text, text, text.rstrip(), parts)

    def _think(self, text: str, parts: list[Part]) -> None:
        text = self._without_first_lines(text)
        self._add_but_space(Reasoning, text, text.rstrip("\n"), parts)

    def _without_first_lines(self, text: str) -> str:
        if self._strip_lines:
            text = text.lstrip("\n")
            self._strip_lines = not text
        return text

    def _add_but_space(
        self, kind: type[Text] | type[Reasoning], text: str, said: str, parts: list[Part]
    ) -> None:
        """Hand out `said`, the beginning of `text`; the rest waits for what follows."""
        if said:
            self._add(kind("".join(self._space) + said), parts)
            self._space.clear()
        if len(said) < len(text):
            self._space.append(text[len(said) :])

    def _add(self, part: Part, parts: list[Part]) -> None:
        if isinstance(part, (Call, Arguments)) or part.text:
            self._begun = self._begun or not isinstance(part, Reasoning)
            self._last = part
            parts.append(part)


def _beginning(marks: Sequence[str]) -> re.Pattern[str] | None:
    """Matches the first character of any of `marks`."""
    return either(sorted({mark[0] for mark in marks}))


def _in_json(end: str) -> re.Pattern[str]:
    return re.compile(rf'\\.|"|{re.escape(end)}', re.DOTALL)
