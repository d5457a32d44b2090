"""What a refusal says to change, as flags: so that tests can follow the advice."""

import dataclasses
import re

from turnout.config import Config
from turnout.errors import Refusal

NUMBERS = r"\d+(?:(?:, | or )\d+)*"
SET = re.compile(rf"(--[a-z-]+)(?: ({NUMBERS}))?")


def followed(config: Config, refusal: Refusal) -> list[Config]:
    """`config` after each alternative that the remedy spells out in numbers or switches."""
    changes = [c for clause in re.split(r", or (?=[a-z-])", refusal.remedy) for c in _changes(clause)]
    return [dataclasses.replace(config, **change) for change in changes]


def _changes(clause: str) -> list[dict]:
    """One clause: "use --a 1 --b 2 or 4", "lower --a and --b to 8 or less", "drop --a", "add --a"."""
    bound = re.search(r" to (\d+) or less", clause)
    if bound:
        return [{_field(flag): int(bound[1]) for flag, _ in SET.findall(clause)}]
    found: list[dict] = [{}]
    for flag, values in SET.findall(clause):
        if clause.startswith("drop "):
            choices = [next(f.default for f in dataclasses.fields(Config) if f.name == _field(flag))]
        elif flag == "--enable-dp-attention":
            choices = [True]
        elif values:
            choices = [int(n) for n in re.findall(r"\d+", values)]
        else:
            return []  # advice that leaves the value to the reader
        found = [change | {_field(flag): choice} for change in found for choice in choices]
    return [change for change in found if change]


def _field(flag: str) -> str:
    return flag[2:].replace("-", "_")
