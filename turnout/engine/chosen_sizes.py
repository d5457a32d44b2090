"""Sizes that flags leave to the plan: running requests, prompt tokens of a step, batches in CUDA graphs.

Each is the largest candidate that costs the KV cache little and leaves decoding to the same backends. Where
the size of the KV cache is given, longer steps cost it nothing: the largest that memory holds is chosen. A
step of that size is timed at the start, and the size halved while it takes too long (warmup.py). A size that
was given stays, or is refused by the plan; only graphs of batches that no step has are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from turnout.config import Config
from turnout.errors import PlanRefused
from turnout.moe.plan import MoEPlan
from turnout.parallel.hardware import Hardware


class Sized(Protocol):
    """What a choice depends on, of an engine plan; `size_reasons` is what it leaves there."""

    @property
    def config(self) -> Config: ...
    @property
    def plan(self) -> MoEPlan: ...
    @property
    def hardware(self) -> Hardware: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def size_reasons(self) -> dict[str, str]: ...


P = TypeVar("P", bound=Sized)

# The least, then larger ones in the order in which they are tried. On an H200,
# where steps overlap, 8192 prompt tokens give 3 to 14 % more tokens/s than 2048 from 32 clients on
# (docs/notes/serving.md).
CANDIDATES = {
    "max_running_requests": {"cuda": (64, 512, 256, 128), "cpu": (64,)},
    "max_prefill_tokens": {"cuda": (2048, 8192, 4096), "cpu": (2048,)},
}
SMALLER = (1024, 512)  # prompt tokens of a step on GPUs where the least of them do not fit
KV_KEPT = 0.9  # of the KV cache that the least sizes leave
AS_ASKED = "as asked"
STEP_SECONDS = 0.5  # of a step of a chosen size: whoever decodes waits as long for a token
REQUEST_TOKENS = 1024  # of the KV cache, for each running request; or a whole context, if that is shorter


def with_sizes(config: Config, device: str, plan_for: Callable[[Config], P]) -> P:
    """The plan for `config` with every size decided; its `size_reasons` say why.

    plan_for: of a configuration whose sizes are given. Raises PlanRefused if the least sizes are refused.
    """
    sizes = {name: getattr(config, name) or each[device][0] for name, each in CANDIDATES.items()}

    def planned(sizes: dict[str, int]) -> P:
        running = sizes["max_running_requests"]
        graphs = min(config.cuda_graph_max_bs or running, running)
        sized: dict[str, Any] = sizes | {"cuda_graph_max_bs": graphs}
        return plan_for(dataclasses.replace(config, **sized))

    try:
        plan = planned(sizes)
    except PlanRefused as refused:
        if device != "cuda" or config.max_prefill_tokens or config.max_total_tokens:
            raise
        plan = _with_smaller_steps(lambda size: planned(sizes | {"max_prefill_tokens": size}), refused)
        sizes["max_prefill_tokens"] = plan.config.max_prefill_tokens
    reasons = dict.fromkeys(sizes, AS_ASKED)
    for name in [name for name in sizes if not getattr(config, name)]:
        reasons[name] = "the default"
        for size in CANDIDATES[name][device][1:]:
            try:
                larger = planned(sizes | {name: size})
            except PlanRefused as refused:
                reasons[name] = f"the plan refuses more: {refused.headline}"
                continue
            against = _against(larger, plan)
            if against:
                reasons[name] = against
                continue
            reasons[name] = _found(larger, plan)
            plan, sizes[name] = larger, size
            break
    if device == "cuda":
        asked, running = config.cuda_graph_max_bs, plan.config.max_running_requests
        reasons["cuda_graph_max_bs"] = AS_ASKED if asked else "all running requests"
        if asked > running:
            reasons["cuda_graph_max_bs"] = f"not {asked}: no step decodes more requests than run"
    plan.size_reasons.update(reasons)
    return plan


def _against(larger: Sized, plan: Sized) -> str:
    """Why not the larger sizes of `larger`; empty: nothing is against them.

    What a running request has of the KV cache counts where the larger size takes some of it.
    """
    tokens = _tokens_per_request(larger)
    if larger.num_pages < KV_KEPT * plan.num_pages or tokens < min(REQUEST_TOKENS, _tokens_per_request(plan)):
        return "with more, requests would have too little KV cache"
    if _decode(larger) != _decode(plan):
        return f"with more, decode steps would run on {' and '.join(_decode(larger))}"
    return ""


def _found(larger: Sized, plan: Sized) -> str:
    """Why the sizes of `larger`, which nothing is against."""
    kept, tokens = larger.num_pages / plan.num_pages, _tokens_per_request(larger)
    leaves = f"leaves {min(kept, 1):.0%} of the KV cache"
    if larger.config.max_total_tokens:
        leaves = f"fits next to the KV cache of {larger.config.max_total_tokens:,} tokens that was asked for"
    return (
        f"{leaves}, {tokens:,} tokens a running request; halved at the start while a step of as many takes "
        f"more than {1000 * STEP_SECONDS:g} ms"
    )


def _with_smaller_steps(planned: Callable[[int], P], refused: PlanRefused) -> P:
    """The plan with as many prompt tokens of a step as leave running requests enough KV cache, or else with
    the fewest that are tried. Raises `refused` where none fits."""
    found: P | None = None
    for size in SMALLER:
        with suppress(PlanRefused):
            found = planned(size)
            if _tokens_per_request(found) >= REQUEST_TOKENS:
                break
    if found is None:
        raise refused
    return found


def sizes_to_time(plan: Sized) -> dict[str, list[int]]:
    """Of sizes that were chosen and have smaller candidates: these and the smaller ones, largest first."""
    found = {}
    for name, each in CANDIDATES.items():
        if plan.size_reasons.get(name, AS_ASKED) == AS_ASKED:
            continue
        size, least = getattr(plan.config, name), each[plan.hardware.device][0]
        if size > least:
            found[name] = [size >> i for i in range(size.bit_length()) if size >> i >= least]
    return found


def _tokens_per_request(plan: Sized) -> int:
    """Of the KV cache, if all run; at least REQUEST_TOKENS where each has room for a whole context."""
    tokens = plan.num_pages * plan.page_size // plan.config.max_running_requests
    return max(tokens, REQUEST_TOKENS) if tokens >= plan.max_context else tokens


def _decode(plan: Sized) -> tuple[str, str]:
    """What decode steps run on."""
    return plan.plan.decode.runner, plan.plan.decode.dispatcher
