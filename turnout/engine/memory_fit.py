"""Whether one rank's weights, buffers and KV cache fit in what its device has, and how many KV pages do.

The KV cache gets `--max-total-tokens`; else on CUDA what --mem-fraction-static leaves; else on a CPU, whose
memory is shared with everything else, CPU_KV_BYTES or one context of the length asked for. Never more than
all running requests could use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from turnout.engine.memory_plan import MemoryTable, Rank
from turnout.errors import PlanRefused, Refusal, standing
from turnout.moe.budget import Budget, fewer_tokens, gigabytes
from turnout.moe.plan import MoEPlan
from turnout.vocabulary import Format

CPU_KV_BYTES = 256 * 10**6


def memory_table(
    rank: Rank, budget: Budget, moe: MoEPlan, replan: Callable[[Budget], MoEPlan]
) -> tuple[MemoryTable, int, int]:
    """(bytes per rank, KV pages, longest context). Raises PlanRefused if they do not fit.

    replan: `moe` for another budget; raises PlanRefused if there is none.
    """
    config = rank.config
    memory = rank.without_kv(budget, moe)
    longest = config.context_length or rank.description.shape.max_position_embeddings
    room = rank.most_pages(memory.available - memory.total, budget)
    if room < 1:
        raise PlanRefused("the model does not fit in memory", [_too_large(rank, memory, budget, replan)])
    pages = _pages(rank, budget, longest, room)
    refusals = _kv_refusals(rank, budget, pages, room)
    if refusals:
        raise PlanRefused("the KV cache does not fit", refusals)
    table = dataclasses.replace(memory, kv=sum(rank.group_bytes(pages, budget)))
    return table, pages, min(longest, pages * config.page_size)


def _pages(rank: Rank, budget: Budget, longest: int, room: int) -> int:
    """KV pages wanted, whether or not they fit in `room` pages."""
    config, hardware = rank.config, rank.hardware
    if config.max_total_tokens:
        return -(-config.max_total_tokens // config.page_size)
    one_context = -(-longest // config.page_size)
    useful = config.max_running_requests * one_context
    if hardware.device == "cuda":
        return min(useful, room)
    asked = one_context if config.context_length else 1
    return min(useful, max(asked, min(room, rank.most_pages(CPU_KV_BYTES, budget))))


def _kv_refusals(rank: Rank, budget: Budget, pages: int, room: int) -> list[Refusal]:
    config, size = rank.config, rank.config.page_size
    flag = "--max-total-tokens" if config.max_total_tokens else "--context-length"
    more = "--max-total-tokens" if config.max_total_tokens else "--mem-fraction-static"
    obstacles = (
        (
            pages > room,
            f"{flag} {pages * size} ({gigabytes(sum(rank.group_bytes(pages, budget)))})",
            f"{gigabytes(sum(rank.group_bytes(room, budget)))} are left for it next to the weights",
            f"use {flag} {room * size} or less, or raise --mem-fraction-static",
        ),
        (
            config.context_length > pages * size,
            f"--context-length {config.context_length}",
            f"the KV cache holds {pages * size} tokens",
            f"use --context-length {pages * size} or less, or raise {more}",
        ),
    )
    return standing("KV cache", obstacles)


def _too_large(
    rank: Rank, memory: MemoryTable, budget: Budget, replan: Callable[[Budget], MoEPlan]
) -> Refusal:
    config, hardware, page_bytes = rank.config, rank.hardware, sum(rank.group_bytes(1, budget))

    def fits(smaller: Budget) -> bool:
        try:
            return rank.without_kv(smaller, replan(smaller)).total + page_bytes <= memory.available
        except PlanRefused:
            return False

    parts = {
        "dense weights": memory.dense,
        "experts": memory.experts,
        "attention workspace": memory.attention,
        "workspace": memory.workspace,
        "dispatch buffers": memory.dispatch,
        "logits": memory.logits,
        "prefill graphs": memory.prefill_graphs,
        f"states of {config.max_running_requests} request{'s' if config.max_running_requests > 1 else ''}": (
            memory.states
        ),
        "one KV page": page_bytes,
    }
    remedies = []
    running = rank.most_requests(memory, budget)
    if 1 <= running < config.max_running_requests:
        remedies.append(f"use --max-running-requests {running} or less")
    if (memory.total + page_bytes) <= hardware.memory_bytes:
        share = -(-100 * (memory.total + page_bytes) // hardware.memory_bytes) / 100
        remedies.append(f"raise --mem-fraction-static to {share:g} or more")
    if memory.dense + memory.experts < memory.available:
        remedies += fewer_tokens(budget, fits)
    if rank.description.moe.format == Format.BF16:
        remedies.append("use a quantised checkpoint (`turnout quantize`)")
    if hardware.device == "cuda":  # ranks of a CPU share its memory
        remedies.append("divide the model among more ranks (--tp-size)")
    remedies.append("take a device with more memory")
    one = ""
    if running < 1 and memory.total - memory.states + page_bytes <= memory.available:
        one = f", which next to the rest hold no state of a request ({gigabytes(rank.request_bytes)})"
    return Refusal(
        who="memory",
        asked=", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size),
        limit=f"{gigabytes(memory.available)} of {hardware.name} may be used "
        f"(--mem-fraction-static {config.mem_fraction_static:g}){one}",
        remedy=", or ".join(remedies),
    )
