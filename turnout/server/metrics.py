"""Prometheus metrics under the prefix `turnout:`.

Latencies are observed here as requests go by; everything that the engine counts is read from its last
report when a scraper asks, so that counters cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turnout.engine.messages import EngineStats
from turnout.server.supervise.engine import EngineSupervisor

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One registry per server, so that several servers can live in one process (tests)."""

    def __init__(self, engine: EngineSupervisor, model_name: str):
        self.registry = CollectorRegistry()
        disable_created_metrics()  # a second series for each, of no use here
        labels = ("model_name",)

        def histogram(name: str, help: str) -> Histogram:
            family = Histogram(f"turnout:{name}", help, labels, buckets=SECONDS, registry=self.registry)
            return family.labels(model_name)

        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token.")
        self.inter_token = histogram("inter_token_latency_seconds", "Between tokens of one sequence.")
        self.latency = histogram("e2e_request_latency_seconds", "Arrival to last token.")
        self._finished = Counter(
            "turnout:request_success",
            "Finished sequences.",
            (*labels, "finished_reason"),
            registry=self.registry,
        )
        self._model_name = model_name
        self.registry.register(EngineCollector(engine, model_name))

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model_name, reason).inc()

    def text(self) -> bytes:
        """The exposition in Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """The engine's last report, rank by rank."""

    def __init__(self, engine: EngineSupervisor, model_name: str):
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        ranks = [self._engine.stats[rank] for rank in sorted(self._engine.stats)]
        restarts = CounterMetricFamily("turnout:engine_restarts", "Times that the ranks started anew.")
        restarts.add_metric([], self._engine.restarts)
        yield restarts
        ledger = self._engine.ledger
        for name, help, count in (
            ("resumed_requests", "Sequences that went on with other ranks.", ledger.resumed),
            (
                "replayed_tokens",
                "Tokens known before that these ranks computed again.",
                ledger.replayed_tokens,
            ),
        ):
            family = CounterMetricFamily(f"turnout:{name}", help)
            family.add_metric([], count)
            yield family
        yield from self._totals(ranks)
        yield from _per_rank(ranks, self._engine.expert_tokens)
        yield from _experts(self._engine.expert_tokens)

    def _totals(self, ranks: list[EngineStats]) -> Iterator[Metric]:
        total = sum(s.pages_total for s in ranks)
        used = sum(s.pages_used for s in ranks)
        gauges = {
            "num_requests_running": ("Sequences being computed.", sum(s.num_running for s in ranks)),
            "num_requests_waiting": ("Sequences in the queue.", sum(s.num_waiting for s in ranks)),
            "kv_cache_usage_perc": (
                "Share of KV pages held by live sequences, 0 to 1.",
                used / total if total else 0,
            ),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens taken in.", sum(s.prompt_tokens for s in ranks)),
            "cached_prompt_tokens": (
                "Prompt tokens found in the prefix cache.",
                sum(s.cached_prompt_tokens for s in ranks),
            ),
            "generation_tokens": ("Tokens generated.", sum(s.generation_tokens for s in ranks)),
            "preemptions": ("Sequences put back for lack of KV pages.", sum(s.preemptions for s in ranks)),
            "spec_draft_tokens": (
                "Tokens proposed by speculative decoding.",
                sum(s.spec_draft_tokens for s in ranks),
            ),
            "spec_accepted_tokens": (
                "Proposed tokens that became output.",
                sum(s.spec_accepted_tokens for s in ranks),
            ),
            "kernels_compiled_after_ready": (
                "GPU kernels compiled, or loaded from disk, while requests waited.",
                sum(s.kernels_compiled for s in ranks),
            ),
        }
        for kind, family in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (help, value) in family.items():
                metric = kind(f"turnout:{name}", help, labels=["model_name"])
                metric.add_metric([self._model_name], value)
                yield metric


def _per_rank(ranks: list[EngineStats], expert_tokens: dict[int, list[list[int]]]) -> Iterator[Metric]:
    steps = CounterMetricFamily("turnout:steps", "Forward passes.", labels=["rank"])
    idle = CounterMetricFamily("turnout:idle_steps", "Forward passes without a token.", labels=["rank"])
    sent = GaugeMetricFamily(
        "turnout:dispatch_tokens", "Token copies sent to experts since the start.", labels=["rank"]
    )
    for stats in ranks:
        rank = str(stats.rank)
        steps.add_metric([rank], stats.steps)
        idle.add_metric([rank], stats.idle_steps)
        sent.add_metric([rank], sum(map(sum, expert_tokens.get(stats.rank, []))))
    yield from (steps, idle, sent)


def _experts(expert_tokens: dict[int, list[list[int]]]) -> Iterator[Metric]:
    """Tokens per layer and expert over all ranks, and how evenly each layer spreads them."""
    tokens = CounterMetricFamily(
        "turnout:expert_tokens", "Tokens that chose an expert.", labels=["layer", "expert"]
    )
    balance = GaugeMetricFamily(
        "turnout:expert_balancedness", "Mean over maximum of a layer's expert tokens.", labels=["layer"]
    )
    for layer, of_ranks in enumerate(zip(*expert_tokens.values(), strict=True)):
        counts = [sum(of_expert) for of_expert in zip(*of_ranks, strict=True)]
        for expert, count in enumerate(counts):
            tokens.add_metric([str(layer), str(expert)], count)
        if counts and max(counts):
            balance.add_metric([str(layer)], sum(counts) / len(counts) / max(counts))
    yield from (tokens, balance)
