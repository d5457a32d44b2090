"""What the dashboard shows of one second, as plain values for JSON."""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from turnout.engine.messages import EngineStats
from turnout.server.api.control import Control
from turnout.server.engine_view import Viewer, waiting_by_reason
from turnout.server.expert_window import Counts
from turnout.server.metric_list import METRICS

QUANTILES = {"p50": 0.5, "p99": 0.99}
LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds")
LATENCY_SECONDS = 60.0  # over which quantiles are taken
RATES = ("prompt_tokens_total", "generation_tokens_total")
SHARES = ("sync_seconds", "prefill_seconds", "decode_seconds")
Buckets = list[tuple[float, float]]  # (upper bound, observations up to it)


class Sampler:
    """Compares each second with the ones before it, as long as somebody looks."""

    def __init__(self, control: Control):
        self._control = control
        self._viewer = Viewer(control.engine)
        self._histograms: dict[str, deque[tuple[float, Buckets]]] = {name: deque() for name in LATENCIES}
        self._values: dict[str, float] = {}
        self._ranks: dict[int, EngineStats] = {}
        self._experts: Counts | None = None
        self._time = 0.0

    def about(self) -> dict[str, Any]:
        """What stays the same until the ranks restart."""
        service, ready = self._control.service, self._control.engine.ready
        info = ready.info if ready else {}
        description = info.get("description", {})
        return {
            "model": service.model_name,
            "layers": list(description.get("moe_layers", [])),
            "experts": description.get("moe", {}).get("num_experts", 0),
            "slices": service.config.ep_size,
            "plan": [*info.get("summary", []), *info.get("plan", {}).get("reasons", [])],
            "startup": info.get("startup_seconds", {}),
        }

    def sample(self) -> dict[str, Any]:
        """Now, and what changed since the last call."""
        now = time.monotonic()
        passed = now - self._time if self._time else 0.0
        engine, view = self._control.engine, self._viewer.view()
        values = {
            metric.name: value
            for metric in METRICS
            if metric.read and metric.labels == ("model_name",)
            for _, value in metric.read(view)
        }
        rates = {name: _rate(values[name], self._values.get(name), passed) for name in RATES}
        ranks = [self._rank(rank, passed) for rank in engine.describe_ranks()]
        experts = self._gained(view.experts)
        self._time, self._values, self._ranks = now, values, dict(engine.stats)
        return {
            "time": time.time(),
            "state": self._control.state,
            "failure": str(engine.last_failure) if engine.last_failure else None,
            "values": values,
            "rates": rates,
            "waiting": waiting_by_reason(view),
            "latency": {name: self._quantiles(name, now) for name in LATENCIES},
            "ranks": ranks,
            "experts": experts,
        }

    def _rank(self, described: dict[str, Any], passed: float) -> dict[str, Any]:
        """A rank's place and state, and how it spent the last second."""
        rank = described["rank"]
        now, before = self._control.engine.stats.get(rank), self._ranks.get(rank)
        kept = ("rank", "state", "phase", "num_running", "num_waiting", "pages_used", "pages_total", "steps")
        told = {name: described.get(name, 0) for name in kept}
        if now is None or before is None or now.steps < before.steps or not passed:
            return told | {"tokens_per_second": 0.0, "step_ms": None, "shares": [0.0] * len(SHARES)}
        spent = [getattr(now, name) - getattr(before, name) for name in SHARES]
        steps = now.steps - before.steps
        return told | {
            "tokens_per_second": (now.computed_tokens - before.computed_tokens) / passed,
            "step_ms": 1000 * sum(spent) / steps if steps else None,
            "shares": [min(1.0, seconds / passed) for seconds in spent],
        }

    def _gained(self, experts: Counts) -> str | None:
        """Tokens of each [layer, expert] since the last call as base64 of little-endian uint32; None if there
        were none."""
        before, self._experts = self._experts, experts
        if before is None or before.shape != experts.shape or (experts < before).any():
            return None  # the first look, or other ranks
        gained = experts - before
        return base64.b64encode(gained.astype("<u4").tobytes()).decode() if gained.any() else None

    def _quantiles(self, name: str, now: float) -> dict[str, float | None]:
        """Of what was observed within the last minute, as far back as somebody looked."""
        seen, buckets = self._histograms[name], self._control.service.metrics.buckets(name)
        while len(seen) > 1 and seen[1][0] <= now - LATENCY_SECONDS:
            seen.popleft()
        before = seen[0][1] if seen else buckets
        seen.append((now, buckets))
        gained = [(bound, count - old) for (bound, count), (_, old) in zip(buckets, before, strict=True)]
        return {key: quantile(gained, q) for key, q in QUANTILES.items()}


def quantile(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket; the last finite bound stands for what is
    beyond; None without observations."""
    total = buckets[-1][1]
    if not total:
        return None
    rank, low, below = q * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if np.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return low


def _rate(value: float, before: float | None, passed: float) -> float:
    """Per second; 0 at first, and when a counter restarted."""
    return max(0.0, value - before) / passed if before is not None and passed else 0.0
