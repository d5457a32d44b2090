"""A configuration's field as a flag: how it is declared, read from text, and checked.

A field is a str, int, float or bool; one whose default is None (not given) may hold None, too. Torch-free.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from turnout.errors import UserError

LARGEST = 2**62  # of whole numbers, so that what is computed of them can be counted and indexed
KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


def flag(
    default: Any,
    help: str,
    *alias: str,
    panel: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A configuration field: its default, help line, alias flags, panel of the help and allowed values."""
    metadata = {
        "help": help,
        "alias": alias,
        "panel": panel,
        "choices": choices,
        "min": minimum,
        "max": maximum,
    }
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def field_type(f: dataclasses.Field) -> type:
    """str, int, float or bool."""
    return KINDS[str(f.type).removesuffix(" | None")]


def parse_field(f: dataclasses.Field, text: str, where: str) -> Any:
    """The value that `text` gives a field. Raises UserError, naming `where` it stood."""
    kind = field_type(f)
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off", ""):
            return False
        raise UserError(f"{where}={text!r}: must be true or false")
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{where}={text!r}: must be of type {kind.__name__}") from None


def check_field(f: dataclasses.Field, value: Any) -> None:
    """Raise UserError unless a field may hold `value`."""
    if value is None and f.default is None:
        return
    where, kind = flag_name(f.name), field_type(f)
    of_kind = isinstance(value, (int, float) if kind is float else kind)
    if not of_kind or (isinstance(value, bool) and kind is not bool):
        raise UserError(f"{where} {value!r}: must be of type {kind.__name__}")
    choices, low, high = f.metadata["choices"], f.metadata["min"], f.metadata["max"]
    if choices and value not in choices:
        raise UserError(f"{where} {value!r}: must be one of {', '.join(choices)}")
    if kind is int and value > LARGEST:
        raise UserError(f"{where} {value}: must be at most {LARGEST}")
    fits = (low is None or value >= low) and (high is None or value <= high)
    if not fits:  # NaN never fits
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise UserError(f"{where} {value!r}: must be {allowed}")
