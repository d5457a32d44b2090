"""`turnout plan`: what would run where, why, and with what memory. Loads no weights, needs no GPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnout.config import Config
from turnout.engine.blueprint import Blueprint, resolve
from turnout.errors import PlanRefused, Refusal
from turnout.moe.plan import PHASES
from turnout.parallel.hardware import named

REFUSED = 2  # exit code, as for every user error


def explain(
    config: Config, *, hardware: str | None = None, as_json: bool = False, console: Console | None = None
) -> int:
    """Print the plan for `config`; returns the exit code, 2 if nothing can run.

    `hardware` names a preset ("h200"); None is this machine. Raises UserError for a model that cannot be
    found or described.
    """
    console = console or Console()
    try:
        blueprint = resolve(config, named(hardware) if hardware else None)
    except PlanRefused as error:
        if as_json:
            refusals = [dataclasses.asdict(r) for r in error.refusals]
            _print_json(console, {"refused": True, "reason": error.headline, "refusals": refusals})
        else:
            console.print(Text(f"Refused: {error.headline}.", style="bold red"))
            _print_refusals(console, error.refusals)
        return REFUSED
    if as_json:
        _print_json(console, {"refused": False} | blueprint.describe())
    else:
        _print(console, blueprint)
    return 0


def _print_json(console: Console, value: dict[str, Any]) -> None:
    console.file.write(json.dumps(value, indent=2) + "\n")


def _print(console: Console, blueprint: Blueprint) -> None:
    plan = blueprint.plan
    for line in _headlines(blueprint):
        console.print(Text(line))
    console.print(_phases(blueprint))
    console.print("Why", style="bold")
    for reason in plan.reasons:
        console.print(Text(f"  - {reason}"))
    console.print(_memory(blueprint))
    console.print(_bounds(blueprint))
    if plan.refused:
        console.print("Considered and refused", style="bold")
        _print_refusals(console, plan.refused)


def _headlines(blueprint: Blueprint) -> list[str]:
    """The model, and the place it is planned for."""
    shape, moe = blueprint.description.shape, blueprint.description.moe
    hardware, topology = blueprint.hardware, blueprint.topology
    lines = [
        f"{blueprint.config.model}: {shape.architecture}, {shape.num_layers} layers, "
        f"{len(blueprint.description.moe_layers)} of them with top-{moe.top_k} of {moe.num_experts} experts "
        f"in {moe.format}",
        f"on {topology.tp_size} x {hardware.name} ({_size(hardware.memory_bytes)}), computing in "
        f"{blueprint.compute_dtype}",
    ]
    if hardware.device == "cuda":
        lines.append("decoding runs eagerly: this version captures no CUDA graphs")
    if topology.tp_size > 1:
        lines.append(
            f"attention: {topology.dp_size} data-parallel group(s) of {topology.attention_tp} rank(s); "
            f"experts: {topology.ep_size} expert-parallel group(s) of {topology.expert_tp} rank(s). "
            "This version plans several ranks, and serves on one"
        )
    return lines


def _phases(blueprint: Blueprint) -> Table:
    table = _table("What runs", ("", *PHASES))
    plan = blueprint.plan
    phases = [plan.phase(name) for name in PHASES]
    rows = {
        "runner": [p.runner for p in phases],
        "dispatcher": [p.dispatcher for p in phases],
        "layout": [p.layout for p in phases],
        "tokens travel in": [p.wire_format for p in phases],
        "GEMMs multiply with": [plan.activation_format for _ in phases],
        "weights are kept": [plan.weight_storage for _ in phases],
        "sum over ranks owed by": [p.reduce for p in phases],
        "most tokens of a batch": [f"{p.max_tokens:,}" for p in phases],
    }
    for what, values in rows.items():
        table.add_row(what, *values)
    return table


def _memory(blueprint: Blueprint) -> Table:
    table = _table("Bytes per rank", ("what", "bytes", ""))
    memory = blueprint.memory
    rows = {
        "dense weights": memory.dense,
        f"experts ({blueprint.plan.weight_storage})": memory.experts,
        f"KV cache ({blueprint.num_pages} pages of {blueprint.page_size} tokens)": memory.kv,
        "runner workspace": memory.workspace,
        "dispatch buffers": memory.dispatch,
        "logits": memory.logits,
        "total": memory.total,
        f"of ({blueprint.config.mem_fraction_static:g} of {blueprint.hardware.name})": memory.available,
    }
    for what, size in rows.items():
        table.add_row(what, f"{size:,}", _size(size))
    return table


def _bounds(blueprint: Blueprint) -> Table:
    table = _table("Token bounds per rank", ("bound", "tokens"))
    budget = blueprint.budget
    rows = {
        "one step, prompts and decoding": budget.local,
        "one step of decoding": budget.decode,
        "per decoding request": budget.tokens_per_request,
        "gathered over data-parallel ranks": budget.gathered,
        "all-to-all capacity": budget.capacity,
        "KV cache": blueprint.num_pages * blueprint.page_size,
        "longest prompt + output": blueprint.max_context,
    }
    for bound, tokens in rows.items():
        table.add_row(bound, f"{tokens:,}")
    return table


def _print_refusals(console: Console, refusals: Sequence[Refusal]) -> None:
    for refusal in refusals:
        console.print(Text(f"  {refusal.who}", style="bold"))
        rows = Table.grid(padding=(0, 1))
        for what in ("asked", "limit", "remedy"):
            rows.add_row(f"    {what:>6}", Text(getattr(refusal, what)))
        console.print(rows)


def _table(title: str, columns: Sequence[str]) -> Table:
    """The first column names, the others hold values."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
