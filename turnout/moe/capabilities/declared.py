"""The runners and dispatchers of this version, by name, as the backends of turnout/registry.py declare them.

Declarations are imported on first use, and the classes that they name when `load` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, ValuesView
from functools import cached_property
from typing import Any, Generic, TypeVar

from turnout.errors import UserError
from turnout.moe.capabilities.capability import Backend, DispatcherCapability, RunnerCapability
from turnout.registry import BACKENDS, load

C = TypeVar("C", RunnerCapability, DispatcherCapability)


class Declared(Generic[C]):
    """Declarations by name, in the order of the registry's backends."""

    def __init__(self, kind: str, of: Callable[[Backend], tuple[C, ...]]) -> None:
        self._kind = kind
        self._of: Callable[[Backend], tuple[C, ...]] = of

    @cached_property
    def entries(self) -> dict[str, C]:
        """Raises ValueError if two backends declare the same name."""
        found: dict[str, C] = {}
        for backend in BACKENDS:
            for declared in self._of(BACKENDS.get(backend)):
                if declared.name in found:
                    raise ValueError(f"{self._kind} {declared.name!r} is declared twice")
                found[declared.name] = declared
        return found

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Other names of some of them."""
        return {alias: name for name, declared in self.entries.items() for alias in declared.aliases}

    def __getitem__(self, name: str) -> C:
        """By name or alias. Raises UserError naming the known ones."""
        name = self.aliases.get(name, name)
        if name not in self.entries:
            raise UserError(f"unknown {self._kind} {name!r}; known: {', '.join(self)}")
        return self.entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def values(self) -> ValuesView[C]:
        return self.entries.values()

    def load(self, name: str) -> Any:
        """The class that implements `name`; raises UserError naming the known ones."""
        return load(self[name].implementation)


RUNNERS: Declared[RunnerCapability] = Declared("MoE runner", lambda backend: backend.runners)
DISPATCHERS: Declared[DispatcherCapability] = Declared("MoE dispatcher", lambda backend: backend.dispatchers)
