"""What tools that serve on one or several ranks share: the ranks, their options, and the results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tools.command_line import parser_for
from turnout.bench.results import result, save
from turnout.parallel.hardware import cpu_name

MODES: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp_size": 2},
    "dp2": {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True},
    "dp4": {"tp_size": 4, "dp_size": 4, "ep_size": 4, "enable_dp_attention": True},
}


def ranks_parser(description: str | None, *, mode: str) -> argparse.ArgumentParser:
    """Takes a model and one of MODES, `mode` unless another is given."""
    parser = parser_for(description)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--mode", choices=MODES, default=mode, help="ranks, and how they share the work")
    return parser


def chaos_options(parser: argparse.ArgumentParser, *, clients: int) -> None:
    """How many failures, how often, and under which load; and where the result goes."""
    parser.add_argument("--failures", type=int, default=12)
    parser.add_argument("--every", type=float, default=3.0, help="seconds of service between two failures")
    parser.add_argument("--clients", type=int, default=clients)
    parser.add_argument("--tokens", type=int, default=150, help="that each request asks for")
    parser.add_argument("--output", type=Path)


def finish(
    benchmark: str, rows: list[dict[str, Any]], output: Path | None, *, failed: bool, **where: Any
) -> NoReturn:
    """Print the rows, save them where an `output` is given, and exit with 1 if `failed`. where: `result`'s
    device and what belongs to it; this machine's CPU unless given."""
    print(msgspec.json.format(msgspec.json.encode(rows)).decode())
    if output is not None:
        save(result(benchmark, rows, **(where or {"device": cpu_name()})), output)
    sys.exit(int(failed))
