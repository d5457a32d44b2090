"""Which modules a checkpoint left unquantised, or quantised in some way, in the dialects of its writers.

| dialect            | an entry matches a module                                                       |
|--------------------|---------------------------------------------------------------------------------|
| compressed-tensors | whose name is the entry; `re:` entries match as a regex from the start of it     |
| modelopt           | whose name, or a parent's, is the entry; `*`, `?` and `[]` as in a shell              |
| quark              | `re:` entries as those of compressed-tensors, others as in a shell               |
| transformers       | as a regex (or plain text) from the start up to a module boundary, or as a suffix |

Records that name thousands of modules one by one are looked up, not matched (`ModulePatterns.named`).

Sources: compressed-tensors `utils/match.py`; ModelOpt's `exclude_modules` as TensorRT-LLM reads it
(`fnmatchcase`); Quark's as vLLM reads it; transformers `quantizers_utils.should_convert_module`.

Does not import torch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from turnout.errors import UserError

_INSIDE = r"(?:\..*)?"  # after the entry: the module itself, or anything inside it
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def _compressed_tensors(entry: str) -> str:
    if entry.startswith("re:"):
        return entry.removeprefix("re:")
    return re.escape(entry) + r"\Z"


def _modelopt(entry: str) -> str:
    glob = fnmatch.translate(entry).removesuffix(r"\Z").removesuffix(r"\z")
    return f"{glob}{_INSIDE}" + r"\Z"


def _quark(entry: str) -> str:
    return entry.removeprefix("re:") if entry.startswith("re:") else fnmatch.translate(entry)


def _transformers(entry: str) -> str:
    return rf"(?:{entry}){_BOUNDARY}|.*{re.escape(entry)}\Z"


DIALECTS: dict[str, Callable[[str], str]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
    "transformers": _transformers,
}


@dataclass(frozen=True)
class ModulePatterns:
    """Entries of one dialect; `matches(module)` says whether any of them applies."""

    entries: tuple[str, ...] = ()
    regexes: tuple[re.Pattern[str], ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, dialect: str, entries: Iterable[str], where: str) -> ModulePatterns:
        """Raises UserError, naming `where` the list stands, for an entry that is no pattern."""
        entries = tuple(entries)
        return cls(entries, tuple(_compile(DIALECTS[dialect], entry, where) for entry in entries))

    @classmethod
    def named(cls, names: Iterable[str]) -> ModulePatterns:
        """The modules of these names, and all inside them."""
        return cls(names=frozenset(names))

    def __add__(self, other: ModulePatterns) -> ModulePatterns:
        """What either matches."""
        return ModulePatterns(
            self.entries + other.entries, self.regexes + other.regexes, self.names | other.names
        )

    def matches(self, module: str) -> bool:
        if any(regex.match(module) for regex in self.regexes):
            return True
        while self.names and module:
            if module in self.names:
                return True
            module = module.rpartition(".")[0]
        return False


def _compile(translate: Callable[[str], str], entry: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(translate(entry))
    except re.error as error:
        raise UserError(f"{where}: {entry!r} is not a valid pattern ({error})") from None
