"""The fields of a configuration class as options of a command, in panels."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import resource
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from turnout.commands.other_engines import refuse
from turnout.config import PANELS, Config, load
from turnout.errors import UserError
from turnout.flags import field_type, flag_name

LEAST_ADDRESSES = 1 << 30  # bytes: torch and numba map nearly as many before there is a model


class InPanels(TyperCommand):
    """A command with a configuration: its help shows its own options first, then the configuration's by what
    they are about, and other engines' flags are refused with ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse(args, {name for p in self.get_params(ctx) for name in (*p.opts, *p.secondary_opts)})
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", "Options", *PANELS)}
        for parameter in self.get_params(ctx):
            own = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record := parameter.get_help_record(ctx):
                panels[getattr(parameter, "rich_help_panel", None) or own].append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


def with_config(cls: type[Config]) -> Callable[[Callable], Callable]:
    """Give a command `config: cls`, built from MODEL, every flag of `cls`, the environment and --config."""

    def decorate(command: Callable) -> Callable:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "config"]
        flags = [_option(f) for f in dataclasses.fields(cls) if f.metadata["panel"]]
        flags.append(
            inspect.Parameter(
                "config_file",
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    str | None,
                    typer.Option("--config", help="YAML file of flags"),
                ],
            )
        )

        @functools.wraps(command)
        def wrapper(**given: Any) -> Any:
            kept = {p.name: given.pop(p.name) for p in own}
            file = given.pop("config_file")
            if kept.get("model") is not None:
                given["model"] = kept["model"]
                _require_address_space()
            return command(config=load(cls, given, config_file=file), **kept)

        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        wrapper.__signature__ = inspect.Signature([*keyword, *flags])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in (*keyword, *flags)}
        return wrapper

    return decorate


def _require_address_space() -> None:
    """Raises UserError if this process may not map what libraries take by themselves.

    Where they fail, they say that they are not installed well.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY and allowed < LEAST_ADDRESSES:
        raise UserError(
            f"this process may map {allowed / 1e9:.1f} GB of memory, and libraries alone take "
            f"{LEAST_ADDRESSES / 1e9:.1f} GB; raise the limit (`ulimit -v unlimited`)"
        )


def _option(f: dataclasses.Field) -> inspect.Parameter:
    kind = field_type(f)
    choices = f.metadata["choices"]
    names = [flag_name(f.name), *f.metadata["alias"]]
    if kind is bool:
        names = [f"{names[0]}/--no-{names[0][2:]}", *names[1:]]
    shown = f.default if f.default != "" else None
    text = f.metadata["help"] + (f" [{'|'.join(choices)}]" if choices else "")
    text += f" (default: {shown})" if shown is not None else ""
    option = typer.Option(*names, help=text, show_default=False, rich_help_panel=f.metadata["panel"])
    return inspect.Parameter(
        f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
