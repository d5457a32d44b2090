"""Prometheus metrics: those of metric_list.py.

What requests go through is observed here as they do; everything that the engine counts is read from its last
report when a scraper asks, so that counters cannot drift apart.
"""

from __future__ import annotations

import collections
import math
import operator
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

import msgspec
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from turnout.server.engine_view import View, Viewer, leading
from turnout.server.metric_list import METRICS, Kind, Metric
from turnout.server.supervise.engine import EngineSupervisor

FAMILIES = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}


class Observations(msgspec.Struct, frozen=True, array_like=True):
    """Of a histogram: how many in each bucket, and the sum of their values."""

    counts: list[int]
    sum: float


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """What requests went through in one process: by histogram, and how many ended for which reason."""

    histograms: dict[str, Observations]
    finished: dict[str, int]


class Histogram(Collector):
    """As prometheus_client's, without its locks and its search through all bounds, which cost 3 us of every
    token: one thread observes and is scraped. It has no labels but the model's name."""

    def __init__(self, metric: Metric, model_name: str):
        self._metric, self._model_name = metric, model_name
        self._bounds = metric.buckets
        self._counts = [0] * (len(self._bounds) + 1)  # the last: of what is above all bounds
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as often as `times` says."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def take(self) -> Observations | None:
        """What was observed since the last call, which forgets it; None if nothing was."""
        if not any(self._counts):
            return None
        taken = Observations(self._counts, self._sum)
        self._counts, self._sum = [0] * len(self._counts), 0.0
        return taken

    def add(self, taken: Observations) -> None:
        """Count what another process observed."""
        self._counts = list(map(operator.add, self._counts, taken.counts))
        self._sum += taken.sum

    def buckets(self) -> list[tuple[float, float]]:
        """(upper bound, observations up to it)."""
        return list(zip([*self._bounds, math.inf], accumulate(map(float, self._counts)), strict=True))

    def collect(self) -> Iterator[Family]:
        metric = self._metric
        family = HistogramMetricFamily(metric.series, metric.help, labels=metric.labels)
        buckets = [(floatToGoString(bound), count) for bound, count in self.buckets()]
        family.add_metric([self._model_name], buckets, self._sum)
        yield family


class Metrics:
    """One registry per server, so that several servers can live in one process (tests)."""

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        disable_created_metrics()  # a second series for each, of no use here
        self._model_name = model_name
        self._finished = collections.Counter[str]()  # since `take`, by reason
        self._observed = {metric.name: self._declare(metric) for metric in METRICS if observed(metric)}
        self.first_token = self.histogram("time_to_first_token_seconds")
        self.inter_token = self.histogram("inter_token_latency_seconds")
        self.latency = self.histogram("e2e_request_latency_seconds")
        self.queue_time = self.histogram("request_queue_time_seconds")
        self.prefill_time = self.histogram("request_prefill_time_seconds")
        self.decode_time = self.histogram("request_decode_time_seconds")
        self.time_per_token = self.histogram("request_time_per_output_token_seconds")
        self.prompt_tokens = self.histogram("request_prompt_tokens")
        self.generation_tokens = self.histogram("request_generation_tokens")
        self.max_tokens = self.histogram("request_params_max_tokens")

    def histogram(self, name: str) -> Histogram:
        """The one of metric_list.py with that name."""
        found = self._observed[name]
        assert isinstance(found, Histogram)
        return found

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """(upper bound, observations up to it) of a histogram that requests are observed in."""
        return self.histogram(name).buckets()

    def finished(self, reason: str, times: int = 1) -> None:
        counter = self._observed["request_success_total"]
        assert isinstance(counter, Counter)
        counter.labels(self._model_name, reason).inc(times)
        self._finished[reason] += times

    def take(self) -> Observed | None:
        """What was observed since the last call, for another process to `add`; None if nothing was."""
        taken = {name: h.take() for name, h in self._observed.items() if isinstance(h, Histogram)}
        finished, self._finished = self._finished, collections.Counter()
        found = {name: observations for name, observations in taken.items() if observations}
        return Observed(found, dict(finished)) if found or finished else None

    def add(self, observed: Observed) -> None:
        """Count what another process took."""
        for name, observations in observed.histograms.items():
            self.histogram(name).add(observations)
        for reason, times in observed.finished.items():
            self.finished(reason, times)

    def text(self) -> bytes:
        """The exposition in Prometheus' text format, version 0.0.4."""
        return generate_latest(self.registry)

    def _declare(self, metric: Metric) -> Counter | Histogram:
        if metric.kind == Kind.COUNTER:
            return Counter(metric.series, metric.help, metric.labels, registry=self.registry)
        histogram = Histogram(metric, self._model_name)
        self.registry.register(histogram)
        return histogram


class EngineCollector(Collector):
    """What the engine reports, read when asked."""

    def __init__(self, engine: EngineSupervisor, model_name: str):
        self._viewer, self._model_name = Viewer(engine), model_name

    def collect(self) -> Iterator[Family]:
        view = self._viewer.view()
        for metric in METRICS:
            if metric.name == STEP_TOKENS:
                yield _step_tokens(metric, view, self._model_name)
            elif metric.read is not None:
                family = FAMILIES[metric.kind](metric.series, metric.help, labels=metric.labels)
                for labels, value in metric.read(view):
                    family.add_metric([self._model_name, *labels], value)
                yield family


STEP_TOKENS = "iteration_tokens_total"


def observed(metric: Metric) -> bool:
    """Whether a metric is observed as requests go by, not read from the engine's report."""
    return metric.read is None and metric.name != STEP_TOKENS


def _step_tokens(metric: Metric, view: View, model_name: str) -> HistogramMetricFamily:
    """The ranks' own histograms, which have powers of two as bounds, added up."""
    ranks = leading(view.ranks)
    sizes = [sum(column) for column in zip(*(stats.step_sizes for stats in ranks), strict=True)]
    family = HistogramMetricFamily(metric.series, metric.help, labels=metric.labels)
    buckets, total = [], 0
    for exponent, count in enumerate(sizes, start=-1):
        total += count
        buckets.append((f"{2**exponent if exponent >= 0 else 0}.0", float(total)))
    tokens = sum(stats.computed_tokens for stats in ranks)
    family.add_metric([model_name], [*buckets, ("+Inf", float(total))], tokens)
    return family
