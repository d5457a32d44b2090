"""What an answer consists of, in order: reasoning, text, calls of tools."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
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
    """arguments: the text of a JSON object, always complete."""

    name: str
    arguments: str
    id: str = field(default_factory=new_call_id)


Part = Text | Reasoning | Call


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
    """The same parts with neighbours of one kind joined."""
    runs: list[Part | tuple[type[Text] | type[Reasoning], list[str]]] = []
    for part in parts:
        if isinstance(part, Call):
            runs.append(part)
        elif runs and isinstance(runs[-1], tuple) and runs[-1][0] is type(part):
            runs[-1][1].append(part.text)
        else:
            runs.append((type(part), [part.text]))
    return [run[0]("".join(run[1])) if isinstance(run, tuple) else run for run in runs]
