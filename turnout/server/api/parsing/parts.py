"""What an answer consists of, in order: reasoning, text, calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: the text of a JSON object, complete unless `open`: then the rest follows as `Arguments`."""

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id)
    open: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """More arguments of the call before it. last: the model has written them all."""

    text: str
    last: bool = False


Part = Text | Reasoning | Call | Arguments


def ends_call(part: Part) -> bool:
    return part.last if isinstance(part, Arguments) else isinstance(part, Call) and not part.open


class Parser(Protocol):
    """Follows the text of one answer. Takes time for what is new, whatever came before."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        ...

    def push(self, text: str) -> list[Part]:
        """The parts that are certain with `text`."""
        ...

    def finish(self, *, cut: bool) -> list[Part]:
        """What is left. `cut`: the answer did not end by itself, so that a call may lack arguments."""
        ...


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same parts with neighbours of one kind joined, and calls with their arguments. A call is left open
    whose last arguments are missing."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and (isinstance(part, Arguments) or (type(runs[-1][-1]) is type(part) is not Call)):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_joined(run) for run in runs]


def _joined(run: list[Part]) -> Part:
    first = run[0]
    if len(run) == 1:
        return first
    text = "".join(part.arguments if isinstance(part, Call) else part.text for part in run)
    match first:
        case Call():
            return replace(first, arguments=text, open=not ends_call(run[-1]))
        case Arguments():
            return Arguments(text, last=ends_call(run[-1]))
        case _:
            return type(first)(text)
