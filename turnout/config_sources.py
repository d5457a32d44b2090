"""Where values of a configuration come from other than flags: TURNOUT_* variables and a YAML file.

Either spells a field as itself or as an alias of its flag. Torch-free.
"""

from __future__ import annotations

import dataclasses
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from turnout.errors import UserError, listed
from turnout.flags import flag_name, parse_field

PREFIX = "TURNOUT_"  # of the variables that say what flags would
Fields: TypeAlias = dict[str, dataclasses.Field]  # by what they may be called; see `spellings`


def read_yaml(path: Path, fields: Fields) -> dict[str, Any]:
    """By field; aliases of flags are keys, too."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--config {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"--config {path}: must be a mapping of flag names to values")
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        name = find_field(str(key).replace("-", "_"), fields, f"--config {path}: {key}").name
        if name in values:
            raise UserError(f"--config {path}: {key} gives {flag_name(name)} a second time; keep one of them")
        values[name] = value
    return values


def read_variables(fields: Fields) -> dict[str, Any]:
    """By field. Raises UserError for a value of another type, and for a name that is nearly a field's."""
    values: dict[str, Any] = {}
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith(PREFIX) or text.startswith("tcp://"):
            continue  # TURNOUT_PORT=tcp://... is what Kubernetes says of a Service that is named turnout
        spelt = variable.removeprefix(PREFIX).lower()
        if spelt not in fields:
            if near := get_close_matches(spelt, fields, 1, cutoff=0.85):
                raise UserError(f"{variable}: unknown; did you mean {PREFIX}{near[0].upper()}?")
            continue  # of another program
        name = fields[spelt].name
        if name in values:
            raise UserError(f"{variable} gives {flag_name(name)} a second time; keep one of the variables")
        values[name] = parse_field(fields[spelt], text, variable)
    return values


def find_field(spelt: str, fields: Fields, where: str) -> dataclasses.Field:
    """The field with this name or alias. Raises UserError, naming `where` it stood."""
    if spelt in fields:
        return fields[spelt]
    near = get_close_matches(spelt, fields, 1)
    raise UserError(
        f"{where}: unknown; " + (f"did you mean {near[0]}?" if near else f"known: {listed(fields)}")
    )


def spellings(cls: type) -> Fields:
    """Fields of `cls` by their names and the aliases of their flags, but those that mean the opposite."""
    spelt: Fields = {}
    for f in dataclasses.fields(cls):
        aliases = (alias[2:].replace("-", "_") for alias in f.metadata["alias"] if "/" not in alias)
        spelt |= dict.fromkeys((f.name, *aliases), f)
    return spelt
