"""`turnout plan`: what would run where, why, and with what memory. Loads no weights, needs no GPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnout.attention.choose import choose_states
from turnout.attention.kinds import LATENT_KINDS, CompressedSpec, SparseLatentSpec
from turnout.checkpoint import CheckpointError, locate, parse_quantization, read_config
from turnout.checkpoint.headers import open_folder
from turnout.commands.plan_memory import (
    bounds_table,
    memory_table,
    new_table,
    requests_table,
    size_text,
)
from turnout.config import Config
from turnout.engine.engine_plan import EnginePlan, read_model, resolve
from turnout.engine.parallel_config import with_default_layout
from turnout.engine.parallel_layouts import ParallelLayout, parallel_layouts, receive_buffers
from turnout.engine.state_limits import why_no_prefix_cache
from turnout.errors import PlanRefused, Refusal
from turnout.flags import flag_name
from turnout.formats.spec import WIRE_FORMATS
from turnout.moe.plan import PHASES, PhasePlan
from turnout.parallel.hardware import detect, named
from turnout.vocabulary import Bf16Units, Format, Reduce, SharedExpert

REFUSED = 2  # exit code, as for every user error
RANKS_SHOWN = 16
SIZES_SHOWN = 8
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
        answer: EnginePlan | PlanRefused = resolve(config, device)
    except PlanRefused as error:
        answer = error
    _warn_of_damage(config)
    others: list[ParallelLayout] = []
    if config.tp_size > 1:
        model = read_model(config)
        config = with_default_layout(config, model.description)
        others = list(parallel_layouts(config, model, device))
    if as_json:
        _print_json(console, answer, others)
    else:
        _print(console, answer)
        _print_layouts(console, config, others)
    return REFUSED if isinstance(answer, PlanRefused) else 0


def _warn_of_damage(config: Config) -> None:
    """Say on standard error what is wrong with the weights, if any are there; a plan needs none."""
    folder = locate(config.model)
    if any(folder.glob("*.safetensors")):
        try:
            open_folder(folder)
        except CheckpointError as error:
            Console(stderr=True, soft_wrap=True).print(
                Text(f"warning: a server would not load this: {error}")
            )


def _print_json(console: Console, answer: EnginePlan | PlanRefused, others: Sequence[ParallelLayout]) -> None:
    value: dict[str, Any] = {"refused": isinstance(answer, PlanRefused)}
    if isinstance(answer, PlanRefused):
        value |= {"reason": answer.headline, "refusals": [dataclasses.asdict(r) for r in answer.refusals]}
    else:
        value |= answer.describe() | {"receive_buffers": [b.describe() for b in receive_buffers(answer)]}
    if others:
        value["parallel_layouts"] = [other.describe() for other in others]
        value["arrangements"] = value["parallel_layouts"]  # as it was called before
    console.file.write(json.dumps(value, indent=2) + "\n")


def _print(console: Console, answer: EnginePlan | PlanRefused) -> None:
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
    console.print(memory_table(answer))
    console.print(bounds_table(answer))
    console.print(requests_table(answer))
    if answer.size_reasons:
        console.print("Sizes", style="bold")
        for name, reason in answer.size_reasons.items():
            console.print(Text(f"  - {flag_name(name)} {answer.size(name)}: {reason}"))
    if answer.topology.tp_size > 1:
        console.print(_buffers(answer))
    if plan.refused:
        console.print("Considered and refused (how to change that: --json)", style="bold")
        _print_limits(console, plan.refused)


def _headlines(engine_plan: EnginePlan) -> list[str]:
    """The model, and the place it is planned for."""
    shape, moe = engine_plan.description.shape, engine_plan.description.moe
    hardware, topology = engine_plan.hardware, engine_plan.topology
    each = " each, of a host's memory" if hardware.device == "cpu" else " each"
    lines = [
        f"{engine_plan.config.model}: {shape.architecture}, {shape.num_layers} layers, "
        f"{len(engine_plan.description.moe_layers)} of them with top-{moe.top_k} of {moe.num_experts} "
        f"experts in {moe.format}",
        f"on {topology.tp_size} x {hardware.name} ({size_text(hardware.memory_bytes)}"
        f"{each if topology.tp_size > 1 else ''}), computing in {engine_plan.compute_dtype}",
    ]
    if hardware.processor:
        lines.append(
            f"{hardware.processor} ({', '.join(hardware.vector_flags)}): bfloat16 is multiplied by "
            f"{_units(engine_plan)}"
        )
    draft, draft_plan = engine_plan.description.draft_moe, engine_plan.plan.draft
    if draft and draft_plan:
        lines.append(
            f"the draft layer's experts are in {draft.format}: runner {draft_plan.prefill.runner}, weights "
            f"{draft_plan.weight_storage}"
        )
    description = engine_plan.description
    stored = parse_quantization(read_config(engine_plan.folder)).of_experts(
        description.experts_prefix.format(description.moe_layers[0])
    )
    if stored and stored.decodes_experts:
        lines.append(
            f"the files hold experts in {stored.stored} ({stored.method}) in a form that no runner "
            f"multiplies in: they are decoded to {moe.format} while they load, and take its memory"
        )
    lines += _attention_lines(engine_plan)
    lines += _state_lines(engine_plan)
    if hardware.device == "cuda":
        reason = engine_plan.why_no_decode_graphs
        lines.append(f"decoding runs eagerly: {reason}" if reason else "decoding runs in CUDA graphs")
        reason = engine_plan.why_no_prefill_graphs
        lines.append(f"prompts run eagerly: {reason}" if reason else "prompts run in CUDA graphs")
    if topology.tp_size > 1:
        lines.append(
            f"{topology.tp_size} ranks on {topology.nnodes} host(s): {topology.dp_size} data-parallel "
            f"group(s) of {topology.attention_tp} for attention, {topology.ep_size} expert-parallel slice(s) "
            f"of {topology.expert_tp} for experts"
        )
    return lines


def _attention_lines(engine_plan: EnginePlan) -> list[str]:
    """What each cache group keeps, and the backend that attends to it."""
    lines = []
    for group, chosen in zip(engine_plan.cache_groups, engine_plan.attention_backends, strict=True):
        spec = group.spec
        kind = f"of window {spec.window}" if spec.window else "over whole contexts"
        if spec.kind in LATENT_KINDS:
            kind += f" of latent vectors ({spec.latent_dim} + {spec.rope_dim})"
        if isinstance(spec, CompressedSpec):
            kind = f"of the last {spec.recent} tokens"
            kind += f" and an entry of each {spec.rate}" if spec.rate else ""
            kind += f", the best {spec.index_topk} of them," if spec.index_topk else ""
            kind += _spare(spec, engine_plan.page_size)
        if isinstance(spec, SparseLatentSpec):
            kind += f", {spec.index_topk} of each context by keys of {spec.index_dim} "
            kind += f"{'in FP8 ' if spec.index_fp8 else ''}that "
            kind += f"{len(group.layers) - len(group.sharing)} layers keep,"
        lines.append(
            f"attention {kind}{' with sinks' if spec.sinks else ''} in {len(group.layers)} layers: {chosen}"
        )
    return lines


def _spare(spec: CompressedSpec, page_size: int) -> str:
    """What is said of pages shorter than the tokens of an entry, which each hold one."""
    times = spec.rate // page_size
    more = f", whose pages of {page_size} tokens take {times} times the memory of --page-size {spec.rate},"
    return more if times > 1 else ""


def _state_lines(engine_plan: EnginePlan) -> list[str]:
    """What recurrent layers keep of a request, and whether prefixes are reused; none of other models."""
    lines, place = [], engine_plan.attention_place
    for states in engine_plan.state_groups:
        chosen, _ = choose_states(states.spec, place)
        lines.append(f"Gated DeltaNet in {len(states.layers)} layers, with a state per request: {chosen}")
    if engine_plan.keeps_states:
        reason = why_no_prefix_cache(engine_plan.config, engine_plan.description)
        interval = engine_plan.config.state_snapshot_interval
        lines.append(
            f"no prefix is reused: {reason}"
            if reason
            else f"prefixes are reused up to multiples of {interval} tokens whose states are among the "
            f"{engine_plan.num_snapshots} that are kept"
        )
    return lines


def _units(engine_plan: EnginePlan) -> str:
    units = engine_plan.plan.bf16_units
    if units != Bf16Units.NONE:
        return f"{units} units"
    if engine_plan.compute_dtype != "bfloat16" and engine_plan.hardware.bf16_units != Bf16Units.NONE:
        return f"none of its {engine_plan.hardware.bf16_units} units, which --dtype bfloat16 would use"
    return "float32 units"


def _phases(engine_plan: EnginePlan) -> Table:
    table = new_table("What runs", ("", *PHASES))
    plan = engine_plan.plan
    phases = [plan.phase(name) for name in PHASES]
    rows: dict[str, list[str]] = {
        "runner": [p.runner for p in phases],
        "dispatcher": [p.dispatcher for p in phases],
        "layout": [p.layout for p in phases],
        "tokens dispatched in": [_wire_format(engine_plan, p) for p in phases],
        "GEMMs multiply with": [plan.activation_format for _ in phases],
        "weights are kept": [plan.weight_storage for _ in phases],
        "sum over ranks made by": [_summed_by(engine_plan, p) for p in phases],
        "most tokens of a batch": [f"{p.max_tokens:,}" for p in phases],
    }
    if engine_plan.description.dense.shared_experts and engine_plan.topology.tp_size > 1:
        rows["shared expert"] = [SHARED[plan.shared_expert] for _ in phases]
    for what, values in rows.items():
        table.add_row(what, *values)
    return table


def _summed_by(engine_plan: EnginePlan, phase: PhasePlan) -> str:
    if engine_plan.topology.tp_size == 1:
        return "none: one rank"
    return "the layer" if phase.reduce == Reduce.LAYER else "the dispatcher"


def _wire_format(engine_plan: EnginePlan, phase: PhasePlan) -> str:
    if _summed_by(engine_plan, phase) != "the dispatcher":
        return "nothing is sent"
    return engine_plan.compute_dtype if phase.wire_format == Format.BF16 else phase.wire_format


def _ranks(engine_plan: EnginePlan) -> Table:
    """Each rank's place; of many, the first ones and the last."""
    own = engine_plan.topology
    table = new_table("Ranks", ("rank", "host", "attention", "experts"))
    shown = range(own.tp_size)
    for rank in shown if len(shown) <= RANKS_SHOWN else [*shown[: RANKS_SHOWN - 1], shown[-1]]:
        topology = dataclasses.replace(own, rank=rank)
        held = topology.expert_range(engine_plan.description.moe.num_experts)
        attention, experts = f"group {topology.dp_rank}", f"{held.start}..{held.stop - 1}"
        if own.attention_tp > 1:
            attention += f", part {topology.attention_tp_rank} of {own.attention_tp}"
        if own.expert_tp > 1:
            experts += f", part {topology.expert_tp_rank} of {own.expert_tp}"
        if rank == shown[-1] and len(shown) > RANKS_SHOWN:
            table.add_row("...", "", "", "")
        table.add_row(str(rank), str(topology.node), attention, experts)
    return table


def _buffers(engine_plan: EnginePlan) -> Table:
    """What each dispatcher of this version would need, chosen or not."""
    table = new_table("Receive buffers per rank", ("dispatcher", "tokens", *WIRE_FORMATS))
    for buffers in receive_buffers(engine_plan):
        sizes = (size_text(buffers.sizes[wire]) if wire in buffers.sizes else "-" for wire in WIRE_FORMATS)
        experts = f" x {buffers.experts} experts" if buffers.experts > 1 else ""
        table.add_row(buffers.dispatcher, f"{buffers.tokens:,}{experts}", *sizes)
    return table


def _print_layouts(console: Console, config: Config, others: Sequence[ParallelLayout]) -> None:
    """A row for each that is supported; the rest by what stands in their way."""
    if not others:
        return
    columns = ("dp", "ep", "attention TP", "expert TP", "experts", "moved by", "weights", "buffers")
    table = new_table(f"Parallel layouts of {config.tp_size} ranks, bytes per rank", columns)
    table.columns[5].overflow, table.columns[5].min_width = "fold", 10
    for other in others:
        if other.engine_plan is None:
            continue
        topology, plan, memory = other.topology, other.engine_plan.plan, other.engine_plan.memory
        asked = (topology.dp_size, topology.ep_size) == (config.dp_size, config.ep_size)
        names = dict.fromkeys(plan.phase(name).dispatcher for name in PHASES)
        table.add_row(
            f"{topology.dp_size}",
            f"{topology.ep_size}",
            f"{topology.attention_tp}",
            f"{topology.expert_tp}",
            f"{plan.num_local_experts}",
            ", ".join(names),
            size_text(memory.dense + memory.experts),
            size_text(memory.dispatch),
            style="bold" if asked else None,
        )
    if table.row_count:
        console.print(table)
        console.print("  ask with --dp-size, --ep-size, and --enable-dp-attention where dp is above 1")
        console.print(Text(f"  {_roomiest(others)}"))
    reasons: dict[Refusal, list[ParallelLayout]] = {}
    for other in others:
        for refusal in other.refusals[:1]:
            reasons.setdefault(refusal, []).append(other)
    sizes = {other.topology.ep_size for other in others}
    if reasons:
        console.print(Text(f"Refused parallel layouts of {config.tp_size} ranks", style="bold"))
    for refusal, refused in reasons.items():
        console.print(Text(f"  dp x ep {_places(refused, sizes)}: {refusal}"))


def _places(refused: Sequence[ParallelLayout], sizes: set[int]) -> str:
    """Of each, dp x ep; where there are many `sizes` of ep and a dp is refused with all, that in short."""
    by_dp: dict[int, list[int]] = {}
    for other in refused:
        by_dp.setdefault(other.topology.dp_size, []).append(other.topology.ep_size)
    return ", ".join(
        f"{dp_size} x any"
        if len(ep_sizes) == len(sizes) > SIZES_SHOWN
        else ", ".join(f"{dp_size} x {ep_size}" for ep_size in ep_sizes)
        for dp_size, ep_sizes in by_dp.items()
    )


def _roomiest(others: Sequence[ParallelLayout]) -> str:
    """The flags of the layout with the most KV cache; of such, of that with the most slices of experts."""
    tokens = {
        (plan.num_pages * plan.page_size * plan.topology.dp_size, plan.topology.ep_size, other.flags)
        for other in others
        if (plan := other.engine_plan) is not None
    }
    most, _, flags = max(tokens)
    return f"most KV cache, {most:,} tokens in all: {flags}"


def _print_refusals(console: Console, refusals: Sequence[Refusal]) -> None:
    for refusal in refusals:
        console.print(Text(f"  {refusal.who}", style="bold"))
        rows = Table.grid(padding=(0, 1))
        for what in ("asked", "limit", "remedy"):
            rows.add_row(f"    {what:>6}", Text(getattr(refusal, what)))
        console.print(rows)


def _print_limits(console: Console, refusals: Sequence[Refusal]) -> None:
    """A line for each backend: of a plan that can run, nothing has to change."""
    limits: dict[str, list[str]] = {}
    for refusal in refusals:
        limits.setdefault(refusal.who, []).append(f"{refusal.asked}: {refusal.limit}")
    for who, found in limits.items():
        console.print(Text(f"  - {who}: {'; '.join(found)}"))
