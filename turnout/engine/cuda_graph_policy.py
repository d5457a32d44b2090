"""Which steps are CUDA graphs, and of which size: decided alike by all ranks, with no device.

A replay is collective. Whether there are graphs follows from the engine plan, which ranks compare at their
rendezvous; which one a step replays follows from their synchronisation before it only: a decode graph if all
of them are decoding, else a prefill graph, and the smallest that holds the batch of the largest, also where a
rank has no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from turnout.attention.capability import AUTO, Place
from turnout.attention.choose import choose
from turnout.attention.kinds import LATENT_KINDS, CacheGroup
from turnout.config import Config
from turnout.moe.budget import Budget
from turnout.moe.capabilities.declared import DISPATCHERS, RUNNERS
from turnout.moe.plan import MoEPlan
from turnout.parallel.hardware import Hardware
from turnout.registry import ATTENTION_BACKENDS
from turnout.vocabulary import AttentionKind

# Tokens of a context, up to which FEW_SPANS of it at most, or more, and the launch that joins them, cost more
# than they give: see `short_context`.
SHORT_CONTEXT, FEW_SPANS, SHORTER_CONTEXT = 256, 4, 128
PREFILL_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def why_no_decode_graphs(
    config: Config,
    hardware: Hardware,
    moe: MoEPlan,
    groups: Sequence[CacheGroup],
    place: Place,
    *,
    keeps_states: bool,
) -> str:
    """Why decode steps cannot be graphs, or "" if they can. keeps_states: whether requests have states of
    fixed size."""
    if hardware.device != "cuda":
        return "there are graphs on CUDA only"
    if config.disable_cuda_graph:
        return "asked for with --disable-cuda-graph"
    if config.speculative and config.deterministic:
        return "--deterministic verifies drafts one after the other"
    if config.speculative and keeps_states:
        return "drafts take the states of their requests one after the other"
    if hardware.present and find_spec("triton") is None:
        return "attention in a graph needs triton: pip install 'triton>=3.6'"
    chosen = [(group.spec.kind, choose(group.spec, place)) for group in groups]
    waiting = {kind for kind, c in chosen if c and not ATTENTION_BACKENDS.get(c.backend).device_tables}
    if waiting & LATENT_KINDS:
        return "latent attention computes with torch"
    if AttentionKind.COMPRESSED in waiting:
        return "compressed attention computes with torch"
    if waiting and config.attention_backend != AUTO:
        return f"--attention-backend {config.attention_backend} computes outside of graphs"
    return _what_waits(moe, moe.decode.dispatcher)


def why_no_prefill_graphs(config: Config, hardware: Hardware, moe: MoEPlan) -> str:
    """Why steps with prompt tokens run eagerly, or "" if they replay graphs between calls of attention and
    of recurrent states."""
    if hardware.device != "cuda":
        return "there are graphs on CUDA only"
    if config.disable_prefill_graph:
        return "asked for with --disable-prefill-graph"
    if config.deterministic:
        return "--deterministic computes each token apart"
    if moe.two_batches:
        return "two micro-batches exchange tokens during attention, where a graph ends"
    return _what_waits(moe, moe.prefill.dispatcher)


def _what_waits(moe: MoEPlan, dispatcher: str) -> str:
    """The runner, or else the dispatcher, that cannot be captured; "" if both can."""
    safe = {f"runner {name}": RUNNERS[name].graph_safe for name in moe.runners}
    safe[f"dispatcher {dispatcher}"] = DISPATCHERS[dispatcher].graph_safe
    waiting = [name for name, captured in safe.items() if not captured]
    return f"{waiting[0]} waits for the host" if waiting else ""


def graph_sizes(config: Config) -> list[int]:
    """Tokens of one rank's step that are captured: 1, 2, 4, then every 8 up to 256, then every 32, and the
    most that --cuda-graph-max-bs requests bring, drafts included: padding never costs much."""
    requests = min(config.cuda_graph_max_bs, config.max_running_requests)
    most = requests * max(1, config.verified_tokens)
    chosen = [1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(288, most + 1, 32)]
    return sorted({size for size in chosen if size <= most} | {most})


def first_sizes(sizes: Sequence[int], waiting: int = 0) -> list[int]:
    """Of `graph_sizes`, those to capture before requests may come: powers of two and the most, so that every
    batch has a graph, if one with more padding than later; and what `waiting` tokens need, which may leave
    no rest to capture another in."""
    needed = next((size for size in sizes if size >= waiting), sizes[-1])
    return [size for size in sizes if size.bit_count() == 1 or size in (needed, sizes[-1])]


def prefill_graph_sizes(budget: Budget) -> list[int]:
    """Tokens of one rank's step that are captured: at most a third of a graph is padding, from 129 tokens on.
    Longer steps run eagerly: launching them takes less time than computing them."""
    most = min(PREFILL_SIZES[-1], budget.local)
    return sorted({size for size in PREFILL_SIZES if size <= most} | {most})


def first_prefill_sizes(sizes: Sequence[int], waiting: int = 0) -> list[int]:
    """Of `prefill_graph_sizes`, those to capture before requests may come: each at least twice the one below
    it, or four times where requests wait already, so that prompts of any length have a graph soon, if one
    with more padding than later."""
    ratio, first = 4 if waiting else 2, [sizes[-1]]
    for size in reversed(sizes):
        if size * ratio <= first[0]:
            first.insert(0, size)
    return first


def short_context(spans: int) -> int:
    """Tokens of a context, up to which steps have graphs of their own, which cut them into fewer spans than
    the others' `spans`.

    Of Qwen3-30B on an H200 (docs/notes/serving.md) 16 requests of 190 tokens took 5 % less without their four
    spans; one request of 64 tokens 2 % less without its 64, but of 195 tokens 8 % more.
    """
    return SHORT_CONTEXT if spans <= FEW_SPANS else SHORTER_CONTEXT
