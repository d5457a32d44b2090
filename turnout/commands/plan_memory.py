"""The tables of `turnout plan` about memory: what takes how many bytes, and how many tokens have room."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from turnout.attention.kinds import CompressedSpec
from turnout.engine.engine_plan import EnginePlan
from turnout.engine.memory_plan import dense_bytes, vocabulary_rows
from turnout.formats.spec import ITEMSIZE
from turnout.vocabulary import AttentionKind


def memory_table(engine_plan: EnginePlan) -> Table:
    """Bytes per rank, by what takes them."""
    table = new_table("Bytes per rank", ("what", "bytes", ""))
    memory = engine_plan.memory
    rows = {
        "dense weights": memory.dense,
        **_dense_rows(engine_plan),
        f"experts ({engine_plan.plan.weight_storage})": memory.experts,
        **_kv_rows(engine_plan),
        **_state_rows(engine_plan),
        **({"attention workspace": memory.attention} if memory.attention else {}),
        "runner workspace": memory.workspace,
        "dispatch buffers": memory.dispatch,
        "logits": memory.logits,
        **({"prefill graphs": memory.prefill_graphs} if memory.prefill_graphs else {}),
        "total": memory.total,
        f"of ({engine_plan.config.mem_fraction_static:g} of {engine_plan.hardware.name})": memory.available,
    }
    for what, size in rows.items():
        table.add_row(what, f"{size:,}", size_text(size))
    return table


def _dense_rows(engine_plan: EnginePlan) -> dict[str, int]:
    """What dense weights are made of."""
    parts = dense_bytes(engine_plan, engine_plan.plan)
    rows = vocabulary_rows(engine_plan.description, engine_plan.topology)
    found = {
        f"  embedding, head ({rows:,} rows)": parts["vocabulary"],
        "  projections of attention": parts["queries"] + parts["keys_values"],
        "  MLPs of dense layers": parts["mlps"],
        "  shared experts": parts["shared_experts"],
        "  norms, routers, the like": parts["replicated"],
    }
    return {what: size for what, size in found.items() if size}


def _kv_rows(engine_plan: EnginePlan) -> dict[str, int]:
    """Bytes of each cache group, and by what they grow."""
    groups, pages = engine_plan.cache_groups, engine_plan.group_pages
    rows, size, itemsize = {}, engine_plan.page_size, ITEMSIZE[engine_plan.compute_dtype]
    kv_bytes = engine_plan.group_bytes(engine_plan.num_pages, engine_plan.budget)
    for group, count, held in zip(groups, pages, kv_bytes, strict=True):
        window = f", {len(group.layers)} layers of window {group.spec.window}" if group.spec.window else ""
        if isinstance(group.spec, CompressedSpec):  # groups of which have as many pages as each other
            if not held:
                continue
            window = f", {len(group.layers)} layers with entries of {group.spec.rate} tokens"
        rows[f"KV cache ({count} pages of {size} tokens{window})"] = held
    kinds = {group.spec.kind for group in groups}
    if whole := [group for group in groups if not group.spec.window]:
        rows["KV per token of context"] = sum(g.page_bytes(size, itemsize) for g in whole) // size
    if AttentionKind.SLIDING_WINDOW in kinds:
        rows["KV per request, of windows"] = sum(
            g.token_bytes(itemsize) * g.spec.window for g in groups if g.spec.window
        )
    return rows


def _state_rows(engine_plan: EnginePlan) -> dict[str, int]:
    """Of layers that keep states: a slot for each running request, and one for padding."""
    if not engine_plan.keeps_states:
        return {}
    running = engine_plan.config.max_running_requests
    each = engine_plan.states_per_request
    kept = f", each with {each - 1} for drafts" if each > 1 else ""
    kept += f", {engine_plan.num_snapshots} snapshots" if engine_plan.num_snapshots else ""
    return {
        f"states ({running} running requests{kept} and 1 spare)": engine_plan.memory.states,
        "states per request": engine_plan.request_bytes,
    }


def bounds_table(engine_plan: EnginePlan) -> Table:
    """The most tokens of a step, of an all-to-all and of the cache."""
    table = new_table("Token bounds per rank", ("bound", "tokens"))
    budget = engine_plan.budget
    rows = {
        "one step, prompts and decoding": budget.local,
        "one step of decoding": budget.decode,
        "per decoding request": budget.tokens_per_request,
        "gathered over data-parallel groups": budget.gathered,
        "all-to-all capacity": budget.capacity,
        "received through an all-to-all": budget.received,
        "KV cache": engine_plan.num_pages * engine_plan.page_size,
        "longest prompt + output": engine_plan.max_context,
    }
    for bound, tokens in rows.items():
        table.add_row(bound, f"{tokens:,}")
    if engine_plan.keeps_states:
        most = engine_plan.most_requests(engine_plan.memory, budget)
        table.add_row("running requests (not tokens) whose states and logits would fit", f"{most:,}")
    return table


def requests_table(engine_plan: EnginePlan) -> Table:
    """How many requests of so many tokens run at once."""
    table = new_table("Requests at once per rank", ("tokens of each", "requests"))
    for tokens, requests in engine_plan.requests_at_once().items():
        table.add_row(f"{tokens:,}", f"{requests:,}")
    return table


def new_table(title: str, columns: Sequence[str]) -> Table:
    """The first column names, the others hold values."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def size_text(count: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
