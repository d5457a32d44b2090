"""Every metric of /metrics: its name, what it says, and where the value comes from.

docs/metrics.md and the Grafana dashboard are generated from this list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from turnout.server.engine_view import View, expert_slices, kv_usage, rank_up, waiting_by_reason
from turnout.server.expert_window import balancedness, hot_share

PREFIX = "turnout:"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Group(StrEnum):
    """Headings of the list, in this order in docs/metrics.md and on the dashboard."""

    REQUESTS = "Requests"
    LATENCY = "Latency"
    TOKENS = "Tokens"
    CACHE = "KV cache and memory"
    STEPS = "Steps and ranks"
    EXPERTS = "Experts"
    STARTS = "Starts"


Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float]]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """name: without the prefix; a counter's ends in _total.

    labels:  `model_name` and those of `read`'s samples
    read:    the samples now; None for what is observed as requests go by
    buckets: of a histogram
    """

    name: str
    kind: Kind
    group: Group
    help: str
    labels: Labels = ("model_name",)
    read: Callable[[View], Samples] | None = None
    buckets: tuple[float, ...] = SECONDS

    @property
    def series(self) -> str:
        """What a query names."""
        return PREFIX + self.name


def _observed(
    name: str, group: Group, help: str, *labels: str, buckets: tuple[float, ...] = SECONDS
) -> Metric:
    kind = Kind.COUNTER if name.endswith("_total") else Kind.HISTOGRAM
    return Metric(
        name=name, kind=kind, group=group, help=help, labels=("model_name", *labels), buckets=buckets
    )


def _total(name: str, group: Group, help: str, read: Callable[[View], float | None]) -> Metric:
    """One value for the whole engine; no sample where it is None."""

    def samples(view: View) -> Samples:
        value = read(view)
        return [] if value is None else [((), value)]

    kind = Kind.COUNTER if name.endswith("_total") else Kind.GAUGE
    return Metric(name=name, kind=kind, group=group, help=help, read=samples)


def _per_rank(name: str, group: Group, help: str, field: str) -> Metric:
    """A counter of every rank."""

    def samples(view: View) -> Samples:
        return [((str(stats.rank),), getattr(stats, field)) for stats in view.ranks]

    return Metric(
        name=name, kind=Kind.COUNTER, group=group, help=help, labels=("model_name", "rank"), read=samples
    )


def _labelled(name: str, group: Group, help: str, labels: Labels, read: Callable[[View], Samples]) -> Metric:
    kind = Kind.COUNTER if name.endswith("_total") else Kind.GAUGE
    return Metric(name=name, kind=kind, group=group, help=help, labels=("model_name", *labels), read=read)


def _step_seconds(view: View) -> Samples:
    for stats in view.ranks:
        rank = str(stats.rank)
        yield (rank, "sync"), stats.sync_seconds
        yield (rank, "prefill"), stats.prefill_seconds
        yield (rank, "decode"), stats.decode_seconds


def _cache_config(view: View) -> Samples:
    if view.ranks:
        yield (str(view.engine.config.page_size), str(view.ranks[0].pages_total)), 1.0


def _memory(view: View) -> Samples:
    for use, size in view.info.get("memory", {}).items():
        if use not in ("available", "total"):
            yield (use,), size


def _slice_balance(view: View) -> float | None:
    slices = expert_slices(view)
    return sum(slices) / len(slices) / max(slices) if any(slices) else None


METRICS = (
    _total(
        "num_requests_running",
        Group.REQUESTS,
        "Sequences being computed.",
        lambda view: view.total("num_running"),
    ),
    _total(
        "num_requests_waiting",
        Group.REQUESTS,
        "Sequences in the queue, or waiting for ranks that restart.",
        lambda view: view.total("num_waiting") + view.engine.ledger.num_parked,
    ),
    _labelled(
        "num_requests_waiting_by_reason",
        Group.REQUESTS,
        "Waiting sequences, by what the first of a rank's queue lacks: a place among --max-running-requests, "
        "KV pages, tokens of --max-prefill-tokens, or prompts of other ranks (--prefill-delayer); or "
        "restart, while ranks restart.",
        ("reason",),
        lambda view: [((reason,), count) for reason, count in waiting_by_reason(view).items()],
    ),
    _observed("request_success_total", Group.REQUESTS, "Finished sequences.", "finished_reason"),
    _total(
        "preemptions_total",
        Group.REQUESTS,
        "Sequences put back for lack of KV pages.",
        lambda view: view.total("preemptions"),
    ),
    _observed(
        "request_prompt_tokens", Group.REQUESTS, "Prompt tokens of finished sequences.", buckets=TOKENS
    ),
    _observed(
        "request_generation_tokens",
        Group.REQUESTS,
        "Generated tokens of finished sequences.",
        buckets=TOKENS,
    ),
    _observed(
        "request_params_max_tokens", Group.REQUESTS, "max_tokens of finished sequences.", buckets=TOKENS
    ),
    _observed("time_to_first_token_seconds", Group.LATENCY, "Arrival to first token."),
    _observed("inter_token_latency_seconds", Group.LATENCY, "Between tokens of one sequence."),
    _observed("e2e_request_latency_seconds", Group.LATENCY, "Arrival to last token."),
    _observed("request_queue_time_seconds", Group.LATENCY, "In the engine's queue, until first scheduled."),
    _observed("request_prefill_time_seconds", Group.LATENCY, "First scheduled to first token."),
    _observed("request_decode_time_seconds", Group.LATENCY, "First token to last token."),
    _observed(
        "request_time_per_output_token_seconds",
        Group.LATENCY,
        "Mean time between tokens of a finished sequence of at least two.",
    ),
    _total(
        "prompt_tokens_total",
        Group.TOKENS,
        "Prompt tokens taken in.",
        lambda view: view.total("prompt_tokens"),
    ),
    _total(
        "generation_tokens_total",
        Group.TOKENS,
        "Tokens generated.",
        lambda view: view.total("generation_tokens"),
    ),
    _total(
        "spec_draft_tokens_total",
        Group.TOKENS,
        "Tokens proposed by speculative decoding.",
        lambda view: view.total("spec_draft_tokens"),
    ),
    _total(
        "spec_accepted_tokens_total",
        Group.TOKENS,
        "Proposed tokens that became output.",
        lambda view: view.total("spec_accepted_tokens"),
    ),
    _total("kv_cache_usage_perc", Group.CACHE, "Share of KV pages held by live sequences, 0 to 1.", kv_usage),
    _total(
        "cached_prompt_tokens_total",
        Group.CACHE,
        "Prompt tokens found in the prefix cache.",
        lambda view: view.total("cached_prompt_tokens"),
    ),
    _total(
        "prefix_cache_queries_total",
        Group.CACHE,
        "Prompt tokens looked up in the prefix cache, by vLLM's name.",
        lambda view: view.total("prompt_tokens"),
    ),
    _total(
        "prefix_cache_hits_total",
        Group.CACHE,
        "Those of them that it held, by vLLM's name.",
        lambda view: view.total("cached_prompt_tokens"),
    ),
    _labelled(
        "cache_config_info",
        Group.CACHE,
        "Always 1; the labels say how many tokens a KV page holds, and how many pages each data-parallel "
        "rank has.",
        ("block_size", "num_gpu_blocks"),
        _cache_config,
    ),
    _labelled(
        "memory_bytes",
        Group.CACHE,
        "Planned memory of a rank, by use.",
        ("use",),
        _memory,
    ),
    _per_rank("steps_total", Group.STEPS, "Forward passes.", "steps"),
    _per_rank("idle_steps_total", Group.STEPS, "Forward passes without a token of this rank.", "idle_steps"),
    _per_rank(
        "uneven_steps_total",
        Group.STEPS,
        "Forward passes in which some data-parallel ranks computed prompts while others only decoded.",
        "uneven_steps",
    ),
    _per_rank(
        "held_prefill_steps_total",
        Group.STEPS,
        "Forward passes in which this rank held prompts back for those of other ranks (--prefill-delayer).",
        "held_steps",
    ),
    _per_rank(
        "cuda_graph_steps_total",
        Group.STEPS,
        "Forward passes as CUDA graphs; the others ran eagerly.",
        "graph_steps",
    ),
    _per_rank(
        "overlapped_steps_total",
        Group.STEPS,
        "Forward passes launched before the tokens of the ones before were read.",
        "overlapped_steps",
    ),
    _labelled(
        "step_seconds_total",
        Group.STEPS,
        "Time in steps, by phase: sync is waiting for the other ranks before a forward; prefill and decode "
        "are the forward and what follows it. What is left of a second is idle.",
        ("rank", "phase"),
        _step_seconds,
    ),
    _per_rank(
        "rank_tokens_total", Group.STEPS, "Tokens of this rank that forwards computed.", "computed_tokens"
    ),
    _total(
        "data_parallel_balancedness",
        Group.STEPS,
        "Mean over maximum of the tokens that data-parallel ranks computed in the last minute; 1 is even.",
        lambda view: balancedness(view.by_rank).get(0),
    ),
    Metric(
        name="iteration_tokens_total",
        kind=Kind.HISTOGRAM,
        group=Group.STEPS,
        help="Tokens of a data-parallel rank in a step.",
    ),
    _labelled(
        "rank_up",
        Group.STEPS,
        "1 if the rank serves, 0 if it loads, stalls or has ended.",
        ("rank",),
        lambda view: [((str(rank),), up) for rank, up in rank_up(view).items()],
    ),
    _total(
        "kernels_compiled_after_ready_total",
        Group.STEPS,
        "GPU kernels compiled, or loaded from disk, while requests waited.",
        lambda view: view.total("kernels_compiled"),
    ),
    _labelled(
        "dispatch_tokens_total",
        Group.EXPERTS,
        "Token copies that this rank sent to experts.",
        ("rank",),
        lambda view: [
            ((str(rank),), sum(map(sum, counts)))
            for rank, counts in sorted(view.engine.expert_tokens.items())
        ],
    ),
    _labelled(
        "expert_balancedness",
        Group.EXPERTS,
        "Mean over maximum of a layer's expert tokens in the last minute; 1 is even.",
        ("layer",),
        lambda view: [((str(layer),), value) for layer, value in balancedness(view.recent).items()],
    ),
    _total(
        "expert_rank_balancedness",
        Group.EXPERTS,
        "Mean over maximum of the tokens that each expert-parallel rank's experts got in the last minute.",
        _slice_balance,
    ),
    _total(
        "hot_expert_share",
        Group.EXPERTS,
        "What the busiest 1 % of all (layer, expert) pairs, at least one, got of all tokens in the last "
        "minute; even would be their share of the pairs.",
        lambda view: hot_share(view.recent),
    ),
    _labelled(
        "expert_tokens_total",
        Group.EXPERTS,
        "Tokens that chose an expert. Only with --enable-expert-metrics: it is one series for each layer and "
        "expert.",
        ("layer", "expert"),
        lambda view: [
            ((str(layer), str(expert)), count)
            for layer, row in enumerate(view.experts.tolist())
            for expert, count in enumerate(row)
            if view.engine.config.enable_expert_metrics
        ],
    ),
    _total(
        "engine_restarts_total",
        Group.STARTS,
        "Times that the ranks restarted.",
        lambda view: view.engine.restarts,
    ),
    _total(
        "resumed_requests_total",
        Group.STARTS,
        "Sequences that went on with other ranks.",
        lambda view: view.engine.ledger.resumed,
    ),
    _total(
        "replayed_tokens_total",
        Group.STARTS,
        "Tokens known before that these ranks computed again.",
        lambda view: view.engine.ledger.replayed_tokens,
    ),
    _labelled(
        "startup_seconds",
        Group.STARTS,
        "How long each phase of rank 0's last start took.",
        ("phase",),
        lambda view: [((phase,), seconds) for phase, seconds in view.info.get("startup_seconds", {}).items()],
    ),
)
