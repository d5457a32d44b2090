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
from turnout.engine.engine_plan import Blueprint, read_model, resolve
from turnout.engine.parallel_layouts import Arrangement, arrangements, receive_buffers
from turnout.engine.step.cuda_graph_policy import why_eager
from turnout.errors import PlanRefused, Refusal
from turnout.formats.spec import WIRE_FORMATS
from turnout.moe.plan import PHASES, PhasePlan
from turnout.parallel.hardware import detect, named
from turnout.vocabulary import Format, Reduce, SharedExpert

REFUSED = 2  # exit code, as for every user error
RANKS_SHOWN = 16
SHARED = {SharedExpert.SHARDED: "a part on each rank", SharedExpert.WHOLE: "whole on each rank"}


def explain(
    config: Config, *, hardware: str | None = None, as_json: bool = False, console: Console | None = None
) -> int:
    """Print the plan for `config`; returns the exit code, 2 if nothing can run.

    `hardware` names a preset ("h200"); None is this machine. Raises UserError for a model that cannot be
    found or described.
    """
    console = console or Console()
    device = named(hardware) if hardware else detect(config.device)
    try:
        answer: Blueprint | PlanRefused = resolve(config, device)
    except PlanRefused as error:
        answer = error
    others = list(arrangements(config, read_model(config), device)) if config.tp_size > 1 else []
    if as_json:
        _print_json(console, answer, others)
    else:
        _print(console, answer)
        _print_arrangements(console, config, others)
    return REFUSED if isinstance(answer, PlanRefused) else 0


def _print_json(console: Console, answer: Blueprint | PlanRefused, others: Sequence[Arrangement]) -> None:
    value: dict[str, Any] = {"refused": isinstance(answer, PlanRefused)}
    if isinstance(answer, PlanRefused):
        value |= {"reason": answer.headline, "refusals": [dataclasses.asdict(r) for r in answer.refusals]}
    else:
        value |= answer.describe() | {"receive_buffers": [b.describe() for b in receive_buffers(answer)]}
    if others:
        value["arrangements"] = [other.describe() for other in others]
    console.file.write(json.dumps(value, indent=2) + "\n")


def _print(console: Console, answer: Blueprint | PlanRefused) -> None:
    if isinstance(answer, PlanRefused):
        console.print(Text(f"Refused: {answer.headline}.", style="bold red"))
        _print_refusals(console, answer.refusals)
        return
    plan = answer.plan
    for line in _headlines(answer):
        console.print(Text(line))
    console.print(_phases(answer))
    console.print("Why", style="bold")
    for reason in plan.reasons:
        console.print(Text(f"  - {reason}"))
    if answer.topology.tp_size > 1:
        console.print(_ranks(answer))
    console.print(_memory(answer))
    console.print(_bounds(answer))
    if answer.topology.tp_size > 1:
        console.print(_buffers(answer))
    if plan.refused:
        console.print("Considered and refused (what would mend it: --json)", style="bold")
        _print_limits(console, plan.refused)


def _headlines(blueprint: Blueprint) -> list[str]:
    """The model, and the place it is planned for."""
    shape, moe = blueprint.description.shape, blueprint.description.moe
    hardware, topology = blueprint.hardware, blueprint.topology
    each = " each, of a host's memory" if hardware.device == "cpu" else " each"
    lines = [
        f"{blueprint.config.model}: {shape.architecture}, {shape.num_layers} layers, "
        f"{len(blueprint.description.moe_layers)} of them with top-{moe.top_k} of {moe.num_experts} experts "
        f"in {moe.format}",
        f"on {topology.tp_size} x {hardware.name} ({_size(hardware.memory_bytes)}"
        f"{each if topology.tp_size > 1 else ''}), computing in {blueprint.compute_dtype}",
    ]
    if hardware.device == "cuda":
        reason = why_eager(blueprint)
        lines.append(f"decoding runs eagerly: {reason}" if reason else "decoding runs in CUDA graphs")
    if topology.tp_size > 1:
        lines.append(
            f"{topology.tp_size} ranks on {topology.nnodes} host(s): {topology.dp_size} data-parallel "
            f"group(s) of {topology.attention_tp} for attention, {topology.ep_size} expert-parallel slice(s) "
            f"of {topology.expert_tp} for experts"
        )
    return lines


def _phases(blueprint: Blueprint) -> Table:
    table = _table("What runs", ("", *PHASES))
    plan = blueprint.plan
    phases = [plan.phase(name) for name in PHASES]
    rows: dict[str, list[str]] = {
        "runner": [p.runner for p in phases],
        "dispatcher": [p.dispatcher for p in phases],
        "layout": [p.layout for p in phases],
        "tokens travel in": [_travels(blueprint, p) for p in phases],
        "GEMMs multiply with": [plan.activation_format for _ in phases],
        "weights are kept": [plan.weight_storage for _ in phases],
        "sum over ranks owed by": [_owed_by(blueprint, p) for p in phases],
        "most tokens of a batch": [f"{p.max_tokens:,}" for p in phases],
    }
    if blueprint.description.dense.shared_experts and blueprint.topology.tp_size > 1:
        rows["shared expert"] = [SHARED[plan.shared_expert] for _ in phases]
    for what, values in rows.items():
        table.add_row(what, *values)
    return table


def _owed_by(blueprint: Blueprint, phase: PhasePlan) -> str:
    if blueprint.topology.tp_size == 1:
        return "nobody"
    return "the layer" if phase.reduce == Reduce.LAYER else "the dispatcher"


def _travels(blueprint: Blueprint, phase: PhasePlan) -> str:
    if _owed_by(blueprint, phase) != "the dispatcher":
        return "nothing travels"
    return blueprint.compute_dtype if phase.wire_format == Format.BF16 else phase.wire_format


def _ranks(blueprint: Blueprint) -> Table:
    """Each rank's place; of many, the first ones and the last."""
    own = blueprint.topology
    table = _table("Ranks", ("rank", "host", "attention", "experts"))
    shown = range(own.tp_size)
    for rank in shown if len(shown) <= RANKS_SHOWN else [*shown[: RANKS_SHOWN - 1], shown[-1]]:
        topology = dataclasses.replace(own, rank=rank)
        held = topology.expert_range(blueprint.description.moe.num_experts)
        attention, experts = f"group {topology.dp_rank}", f"{held.start}..{held.stop - 1}"
        if own.attention_tp > 1:
            attention += f", part {topology.attention_tp_rank} of {own.attention_tp}"
        if own.expert_tp > 1:
            experts += f", part {topology.expert_tp_rank} of {own.expert_tp}"
        if rank == shown[-1] and len(shown) > RANKS_SHOWN:
            table.add_row("...", "", "", "")
        table.add_row(str(rank), str(topology.node), attention, experts)
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
        "gathered over data-parallel groups": budget.gathered,
        "all-to-all capacity": budget.capacity,
        "received through an all-to-all": budget.received,
        "KV cache": blueprint.num_pages * blueprint.page_size,
        "longest prompt + output": blueprint.max_context,
    }
    for bound, tokens in rows.items():
        table.add_row(bound, f"{tokens:,}")
    return table


def _buffers(blueprint: Blueprint) -> Table:
    """What each dispatcher of this version would need, chosen or not."""
    table = _table("Receive buffers per rank", ("dispatcher", "tokens", *WIRE_FORMATS))
    for buffers in receive_buffers(blueprint):
        sizes = (_size(buffers.sizes[wire]) if wire in buffers.sizes else "-" for wire in WIRE_FORMATS)
        slabs = f" x {buffers.slabs} experts" if buffers.slabs > 1 else ""
        table.add_row(buffers.dispatcher, f"{buffers.tokens:,}{slabs}", *sizes)
    return table


def _print_arrangements(console: Console, config: Config, others: Sequence[Arrangement]) -> None:
    """A row for each that is supported; the rest by what stands in their way."""
    if not others:
        return
    columns = ("dp", "ep", "attention TP", "expert TP", "experts", "moved by", "weights", "buffers")
    table = _table(f"Arrangements of {config.tp_size} ranks, bytes per rank", columns)
    table.columns[5].overflow, table.columns[5].min_width = "fold", 10
    for other in others:
        if other.blueprint is None:
            continue
        topology, plan, memory = other.topology, other.blueprint.plan, other.blueprint.memory
        asked = (topology.dp_size, topology.ep_size) == (config.dp_size, config.ep_size)
        names = dict.fromkeys(plan.phase(name).dispatcher for name in PHASES)
        table.add_row(
            f"{topology.dp_size}",
            f"{topology.ep_size}",
            f"{topology.attention_tp}",
            f"{topology.expert_tp}",
            f"{plan.num_local_experts}",
            ", ".join(names),
            _size(memory.dense + memory.experts),
            _size(memory.dispatch),
            style="bold" if asked else None,
        )
    if table.row_count:
        console.print(table)
        console.print("  ask with --dp-size, --ep-size, and --enable-dp-attention where dp is above 1")
    reasons: dict[Refusal, list[Arrangement]] = {}
    for other in others:
        for refusal in other.refusals[:1]:
            reasons.setdefault(refusal, []).append(other)
    if reasons:
        console.print(Text(f"Refused arrangements of {config.tp_size} ranks", style="bold"))
    for refusal, refused in reasons.items():
        places = ", ".join(f"{o.topology.dp_size} x {o.topology.ep_size}" for o in refused)
        console.print(Text(f"  dp x ep {places}: {refusal}"))


def _print_refusals(console: Console, refusals: Sequence[Refusal]) -> None:
    for refusal in refusals:
        console.print(Text(f"  {refusal.who}", style="bold"))
        rows = Table.grid(padding=(0, 1))
        for what in ("asked", "limit", "remedy"):
            rows.add_row(f"    {what:>6}", Text(getattr(refusal, what)))
        console.print(rows)


def _print_limits(console: Console, refusals: Sequence[Refusal]) -> None:
    """A line for each backend: of a plan that can run, nobody has to mend anything."""
    limits: dict[str, list[str]] = {}
    for refusal in refusals:
        limits.setdefault(refusal.who, []).append(f"{refusal.asked}: {refusal.limit}")
    for who, found in limits.items():
        console.print(Text(f"  - {who}: {'; '.join(found)}"))


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
