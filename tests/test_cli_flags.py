"""The public command line, frozen: adding, renaming or dropping an option is a decision, made in
cli_flags.txt. A name that anybody may have in a script stays.

After a deliberate change: `python -m tests.test_cli_flags` writes the file again.
"""

import dataclasses
from pathlib import Path

import typer.main

from turnout.cli import app
from turnout.config import Config, ServerConfig
from turnout.flags import flag_name

FROZEN = Path(__file__).with_name("cli_flags.txt")
ROOT = "turnout"
SHARED = "shared by serve, plan, generate and eval"


def commands() -> dict[str, set[str]]:
    """Command -> its arguments (in capitals) and options with all their spellings."""
    found = {}
    pending = [("", typer.main.get_command(app))]
    while pending:
        path, command = pending.pop()
        inner = getattr(command, "commands", None)
        if path == "":
            found[ROOT] = {name for parameter in command.params for name in _names(parameter)}
        if inner is None:
            found[path] = {name for parameter in command.params for name in _names(parameter)}
        else:
            pending += [(f"{path} {name}".strip(), c) for name, c in inner.items()]
    shared = set.intersection(*(found[name] for name in ("serve", "plan", "generate", "eval")))
    trimmed = {name: options - shared if shared <= options else options for name, options in found.items()}
    return {SHARED: shared} | trimmed


def _names(parameter) -> list[str]:
    if parameter.param_type_name == "argument":
        return [parameter.name.upper()]
    return [*parameter.opts, *parameter.secondary_opts]


def listing() -> str:
    table = commands()
    return "".join(f"{name}\n" + "".join(f"    {o}\n" for o in sorted(table[name])) for name in sorted(table))


def test_the_public_options_are_those_on_record():
    assert listing() == FROZEN.read_text(), "a public option changed; see the top of this file"


def test_every_field_of_the_configuration_is_a_flag():
    table = commands()
    for cls, place in ((Config, SHARED), (ServerConfig, "serve")):
        for field in dataclasses.fields(cls):
            if field.name != "model":
                spellings = {flag_name(field.name), *"/".join(field.metadata["alias"]).split("/")} - {""}
                assert spellings <= table[SHARED] | table[place], field.name


if __name__ == "__main__":
    FROZEN.write_text(listing())
