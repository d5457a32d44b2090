"""Arguments of a call that are handed out while the model writes them."""

from __future__ import annotations

import re
from collections.abc import Collection

from turnout.server.api.parsing.calls import arguments_begin, same_arguments
from turnout.server.api.parsing.family import CallFormat
from turnout.server.api.parsing.parts import Arguments, Call, Part, new_call_id

LONGEST_HEAD = 512  # characters before the arguments; of a call with more they come whole
_TOKENS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class StreamedCall:
    """One call. It is certain to be one when it names a function that is offered and a JSON object of
    arguments has begun; from then on what the model writes is arguments, whether or not they become JSON.

    The brace that closes them waits until the whole call has been read, so that what was handed out of a
    call that breaks off is never JSON.
    """

    def __init__(self, written: CallFormat | None, functions: Collection[str]):
        """written: None where nothing but the arguments of the only one of `functions` is pushed."""
        self._head = arguments_begin(written)
        self._functions = functions
        self._seen = ""  # before the call is certain
        self._call: Call | None = None
        self._given: list[str] = []
        self._half = ""  # a backslash whose character has not come
        self._held = ""  # from the closing brace on
        self._depth, self._in_string = 0, False

    @property
    def begun(self) -> bool:
        """Whether parts have been handed out."""
        return self._call is not None

    def push(self, text: str) -> list[Part]:
        """text: holds no mark that ends the call."""
        parts: list[Part] = []
        text = self._half + text
        self._half = "\\" if (len(text) - len(text.rstrip("\\"))) % 2 else ""
        text = text[: len(text) - len(self._half)]
        if self._call is None:
            if self._head is None:
                return []
            self._seen += text
            found = self._head.match(self._seen[:LONGEST_HEAD])
            if found is None:
                if len(self._seen) >= LONGEST_HEAD:
                    self._head = None
                return []
            named = found.groupdict()
            name = named.get("name") or next(iter(self._functions))
            if name not in self._functions:
                self._head = None
                return []
            self._call = Call(name, "", named.get("id") or new_call_id(), open=True)
            parts.append(self._call)
            text = self._seen[found.end() :]
        inside = self._inside(text)
        self._held += text[inside:]
        if inside:
            self._given.append(text[:inside])
            parts.append(Arguments(text[:inside]))
        return parts

    def finish(self, read: Call | None, *, ended: bool) -> list[Part]:
        """The last part of a call that has begun.

        read: the whole call, None if it is not written as it should be. ended: the model wrote no more of it,
        so that a call which cannot be read is handed out as it is.
        """
        assert self._call is not None
        given = "".join(self._given) + "}"
        if read is not None and read.name == self._call.name and same_arguments(given, read.arguments):
            return [Arguments("}", last=True)]
        return [Arguments(self._held + self._half, last=True)] if ended else []

    def _inside(self, text: str) -> int:
        """How many characters of `text` stand before the brace that closes the arguments."""
        if self._held:
            return 0
        for token in _TOKENS.finditer(text):
            match token[0]:
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[" if not self._in_string:
                    self._depth += 1
                case "}" | "]" if not self._in_string:
                    self._depth -= 1
                    if self._depth <= 0:
                        return token.start()
        return len(text)
